"""Runs inside SGLang's schedulers: puts published tensors into the engine's models, and looks at what came of it.

SGLang calls `load` for every model of every tensor-parallel rank, the policy and then its drafters, with one named
tensor: the name is the message, the tensor is empty. `meet` makes the models known. `serve` connects back to the
trainer and takes its commands until it says that it is done: a publish is one request to the server, whatever the
number of its buckets. An exception here would end the scheduler; it becomes an answer instead. Imports nothing that
the engine's interpreter may lack.
"""

import json
import logging
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_megatron.rollout.sglang.wire import receive_message, send_message
from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.device_memory import open_handle
from grpo_megatron.weights.shared_buffer import SharedBuffer

_POISONED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Tensors = list[tuple[str, torch.Tensor]]


class Receiver:
    """One scheduler's models and the trainer's memory that is open here."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._memory: Mapping[str, Any] = {}
        self._opened: SharedBuffer | torch.Tensor | None = None

    def load(self, model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Called for every model in turn. Never raises."""
        try:
            message = json.loads(named_tensors[0][0])
            number = self._meet(model)
            if message["action"] == "serve" and number == 0:
                self._serve(message)
        except Exception:  # noqa: BLE001 it would end the scheduler; the trainer misses the answer and says so
            logging.getLogger(__name__).exception("the trainer's message failed")

    def _meet(self, model: torch.nn.Module) -> int:
        """0 for the policy, then its drafters, in the order in which SGLang calls."""
        for number, known in enumerate(self._models):
            if known() is model:
                return number
        self._models.append(weakref.ref(model))
        return len(self._models) - 1

    def _serve(self, message: Mapping[str, Any]) -> None:
        """Answer the trainer's commands until it ends or gives up the publish.

        Raises:
            OSError: it is not there, or silent for longer than it said it would be.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(message["deadline_seconds"])
            connection.connect("\0" + message["address"])
            hello = {"token": message["token"], "rank": message["rank"], "num_models": len(self._models)}
            send_message(connection, hello)
            is_over = False
            while not is_over:
                try:
                    command = receive_message(connection)
                except EOFError:
                    return  # given up
                is_over = command["action"] == "end"
                send_message(connection, {"error": None, "models": []} if is_over else self._answer(command))

    def _answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """What came of it for every model."""
        number = 0
        try:
            action = _ACTIONS[command["action"]]
            found = []
            with torch.no_grad():
                tensors = self._tensors(command)
                for number, known in enumerate(self._models):  # noqa: B007 named in the answer to a failure
                    model = known()
                    assert model is not None, "the scheduler has another model now"
                    found.append(action(model, tensors))
                    _wait_for_device(model)
        except Exception as error:  # noqa: BLE001 the trainer decides what a failure means
            logging.getLogger(__name__).exception("a command of the trainer failed")
            return {"error": f"{type(error).__name__}: {error}", "models": [], "failed": number}
        return {"error": None, "models": found}

    def _tensors(self, command: Mapping[str, Any]) -> _Tensors:
        """Views of the trainer's memory."""
        if command["memory"] is None:
            return []
        buffer = self._buffer(command["memory"])
        found = []
        for name, dtype_name, shape, offset in command["entries"]:
            dtype = getattr(torch, dtype_name)
            end = offset + torch.Size(shape).numel() * dtype.itemsize
            if end > buffer.nbytes:
                raise ValueError(f"{name} ends at byte {end} of {buffer.nbytes}")
            tensor = buffer[offset:end].view(dtype).view(shape)
            # SGLang's mark for memory that is used again: it then copies at once and in this thread.
            tensor._sglang_runai_streamer_tensor = True  # type: ignore[attr-defined]
            found.append((name, tensor))
        return found

    def _buffer(self, memory: Mapping[str, Any]) -> torch.Tensor:
        """On the device by its handle, else shared host memory by its path; stays open for the next time."""
        opened = self._opened
        if isinstance(opened, SharedBuffer) and not opened.is_at(memory.get("path", "")):
            opened = None
        if opened is None or memory != self._memory:
            self._opened = opened = None  # what is open cannot be freed by the trainer
            path = memory.get("path")
            opened = open_handle(memory) if path is None else SharedBuffer.open(path, memory["num_bytes"])
            self._opened, self._memory = opened, memory
        return opened.tensor if isinstance(opened, SharedBuffer) else opened


def _load(model: torch.nn.Module, tensors: _Tensors) -> dict[str, Any]:
    model.load_weights(tensors)  # type: ignore[operator]
    return {}


def _probe(model: torch.nn.Module, tensors: _Tensors) -> dict[str, Any]:
    """Can the trainer's memory be read from here?"""
    return {"checksums": {name: checksum(tensor) for name, tensor in tensors}}


def _poison(model: torch.nn.Module, tensors: _Tensors) -> dict[str, Any]:
    """Fill the parameters with NaN, so that one which no publish reaches cannot go unnoticed.

    Single values are scales of quantized layers and caches, which no checkpoint needs to have.
    """
    for parameter in model.parameters():
        if parameter.dtype in _POISONED and parameter.numel() > 1:
            parameter.fill_(torch.nan)
    return {}


def _complete(model: torch.nn.Module, tensors: _Tensors) -> dict[str, Any]:
    """Parameters that still have NaN somewhere."""
    named = model.named_parameters()
    return {"nan": [name for name, value in named if value.dtype in _POISONED and bool(value.isnan().any())]}


def _compare(model: torch.nn.Module, tensors: _Tensors) -> dict[str, Any]:
    """Checksums of what arrived, and what loading it once more writes and changes: nothing, if all is well."""
    writes = _Writes(model)

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            writes.current = name
            yield name, tensor

    with writes:
        model.load_weights(watched())  # type: ignore[operator]
    if len(tensors) > 1 and writes.first == tensors[-1][0]:
        # This model takes the whole list before it writes anything: which tensor it was cannot be told.
        for found in (writes.taken, writes.changed):
            found.update(name for name, _ in tensors if found)
    return _probe(model, tensors) | {"taken": sorted(writes.taken), "changed": sorted(writes.changed)}


_ACTIONS: Mapping[str, Callable[[torch.nn.Module, _Tensors], dict[str, Any]]] = {
    "probe": _probe,
    "poison": _poison,
    "load": _load,
    "compare": _compare,
    "complete": _complete,
}


class _Writes(TorchDispatchMode):
    """Sees every operation that writes into a model's parameters and buffers, and whether it changed a bit.

    `current` is the published tensor to which the writes are ascribed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        owned = [*model.parameters(), *model.buffers()]
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in owned}
        self.current = self.first = ""
        self.taken: set[str] = set()
        self.changed: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = [
            value
            for index, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in (args[index] if index < len(args) else kwargs.get(argument.name),)
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._storages
        ]
        before = [_bits(tensor).clone() for tensor in written]
        result = func(*args, **kwargs)
        for tensor, bits in zip(written, before, strict=True):
            self.first = self.first or self.current
            self.taken.add(self.current)
            if not torch.equal(_bits(tensor), bits):
                self.changed.add(self.current)
        return result


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: NaN equals itself, and 0 differs from -0."""
    return tensor.view(_BITS[tensor.dtype.itemsize])


def _wait_for_device(model: torch.nn.Module) -> None:
    """The trainer uses its memory again once it has the answer."""
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()


_receiver = Receiver()


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's `custom_weight_loader`. Never raises."""
    _receiver.load(model, named_tensors)
