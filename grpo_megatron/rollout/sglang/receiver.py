"""Runs inside SGLang's schedulers: puts published tensors into the engine's models, and looks at what came of it.

SGLang calls `load` for every model of every tensor-parallel rank (the policy, then its drafters) with one named tensor:
the name is the message, the tensor is empty. An exception here would end the scheduler, so the outcome goes into a
report, one file per message, rank and model, which `SglangSink` reads. Imports nothing that the engine's interpreter
may lack.
"""

import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.device_memory import open_handle
from grpo_megatron.weights.shared_buffer import SharedBuffer

_POISONED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_models: list[weakref.ref[torch.nn.Module]] = []
_opened: dict[str, Any] = {}
"""The sender's memory, by where it lies. One at a time: what is open cannot be freed by the sender."""


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's `custom_weight_loader`. Never raises."""
    report: dict[str, Any] = {"error": None}
    message: dict[str, Any] = {}
    try:
        message = json.loads(named_tensors[0][0])
        with torch.no_grad():
            report |= _ACTIONS[message["action"]](model, message)
            _wait_for_device(model)
    except Exception as error:  # noqa: BLE001 it would end the scheduler; the sender decides what a failure means
        logging.getLogger(__name__).exception("a message of the trainer failed")
        report["error"] = f"{type(error).__name__}: {error}"
    try:
        _write(report, message, _number_of(model))
    except Exception:  # noqa: BLE001 as above; the sender misses the report and says so
        logging.getLogger(__name__).exception("the report of a message could not be written")


def _load(model: torch.nn.Module, message: Mapping[str, Any]) -> dict[str, Any]:
    model.load_weights(_tensors(message))  # type: ignore[operator]
    return {}


def _probe(model: torch.nn.Module, message: Mapping[str, Any]) -> dict[str, Any]:
    """Can the sender's memory be read from here?"""
    return {"checksum": checksum(_buffer(message))}


def _poison(model: torch.nn.Module, message: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the parameters with NaN, so that one which no publish reaches cannot go unnoticed.

    Single values are scales of quantized layers and caches, which no checkpoint needs to have.
    """
    for parameter in model.parameters():
        if parameter.dtype in _POISONED and parameter.numel() > 1:
            parameter.fill_(torch.nan)
    return {}


def _complete(model: torch.nn.Module, message: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that still have NaN somewhere."""
    named = model.named_parameters()
    return {"nan": [name for name, value in named if value.dtype in _POISONED and bool(value.isnan().any())]}


def _compare(model: torch.nn.Module, message: Mapping[str, Any]) -> dict[str, Any]:
    """Checksums of what arrived, and what loading it once more writes and changes: nothing, if all is well."""
    tensors = _tensors(message)
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
    return {
        "checksums": {name: checksum(tensor) for name, tensor in tensors},
        "taken": sorted(writes.taken),
        "changed": sorted(writes.changed),
    }


_ACTIONS: Mapping[str, Callable[[torch.nn.Module, Mapping[str, Any]], dict[str, Any]]] = {
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


def _tensors(message: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Views of the sender's memory."""
    buffer = _buffer(message)
    found = []
    for name, dtype_name, shape, offset in message["entries"]:
        dtype = getattr(torch, dtype_name)
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        if end > buffer.nbytes:
            raise ValueError(f"{name} ends at byte {end} of {buffer.nbytes}")
        tensor = buffer[offset:end].view(dtype).view(shape)
        # SGLang's mark for memory that is used again: it then copies at once and in this thread.
        tensor._sglang_runai_streamer_tensor = True  # type: ignore[attr-defined]
        found.append((name, tensor))
    return found


def _buffer(message: Mapping[str, Any]) -> torch.Tensor:
    """The sender's memory: on the device by its handle, else shared host memory by its path."""
    memory = message["memory"]
    key = json.dumps(memory, sort_keys=True)
    known = _opened.get(key)
    if known is not None and ("path" not in memory or known.is_at(memory["path"])):
        return known.tensor if "path" in memory else known
    _opened.clear()
    if "path" in memory:
        _opened[key] = SharedBuffer.open(memory["path"], memory["num_bytes"])
        return _opened[key].tensor
    _opened[key] = open_handle(memory)
    return _opened[key]


def _wait_for_device(model: torch.nn.Module) -> None:
    """The sender uses its memory again once it has the report."""
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()


def _number_of(model: torch.nn.Module) -> int:
    """0 for the policy, then its drafters, in the order in which SGLang calls."""
    for number, known in enumerate(_models):
        if known() is model:
            return number
    _models.append(weakref.ref(model))
    return len(_models) - 1


def _write(report: dict[str, Any], message: Mapping[str, Any], number: int) -> None:
    """Whole or not at all, under a name that no other message, rank or model has."""
    folder, name = Path(message["report"]), f"{message['number']}-{message['rank']}-{number}"
    part = folder / f"{name}.part"
    part.write_text(json.dumps(report | {"rank": message["rank"], "model": number}))
    os.replace(part, folder / f"{name}.json")
