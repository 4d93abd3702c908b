"""An open weight update of an SGLang server: one request that lasts, and a connection to each of its schedulers."""

import base64
import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import torch

from grpo_megatron.rollout.sglang.arguments import RECEIVER
from grpo_megatron.rollout.sglang.control import EngineFailure
from grpo_megatron.rollout.sglang.wire import receive_message, send_message
from grpo_megatron.weights.naming import short_list
from grpo_megatron.weights.sink import Bucket

Memory = Mapping[str, Any]
"""Where a scheduler finds the bytes: `path` and `num_bytes`, or what `export_handle` gives."""
Outcome = dict[str, Any]
"""Of one model on one rank of the engine: `rank`, `model`, and what the receiver's action found."""

_REQUEST_SECONDS = 24 * 3600.0
"""The request lasts as long as the publish; each answer in it has a deadline of its own."""
_SILENCE_SECONDS = 3600.0
"""How long a scheduler waits for the next command: other ranks of the trainer may take their time."""
_JOIN_SECONDS = 10.0


class EngineControl(Protocol):
    """Calls to the server that raise when the answer is not good (see `Control`)."""

    def get(self, path: str) -> dict[str, Any]: ...

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, deadline_seconds: float | None = None
    ) -> dict[str, Any]: ...


class WeightSession:
    """Commands to the receivers in all schedulers, one at a time; `close` or `abandon` ends it.

    Args:
        memories: one for each tensor-parallel rank of the engine.
        is_first: with this server: its receivers do not know their models yet.
        deadline_seconds: for every single answer of a scheduler.

    Raises:
        EngineFailure: here and in every method but `abandon`; the session is of no use then.
    """

    def __init__(
        self, control: EngineControl, memories: Sequence[Memory], *, is_first: bool, deadline_seconds: float
    ) -> None:
        self._control, self._memories, self._deadline_seconds = control, memories, deadline_seconds
        self._connections: dict[int, socket.socket] = {}
        self._asked = ""
        self._request: _Request | None = None
        self.num_models = 0
        """Of every rank: the policy, and drafters."""
        self._begin()
        try:
            if is_first:
                meet = [{"action": "meet"} for _ in memories]
                control.post("/update_weights_from_tensor", update_body(meet))
            self._connect()
        except BaseException:
            self.abandon()
            raise

    def ask(self, action: str, bucket: Bucket | None = None) -> list[Outcome]:
        """Send a command and wait for what came of it: rank by rank, the policy first."""
        self.send(action, bucket)
        return self.receive()

    def send(self, action: str, bucket: Bucket | None = None) -> None:
        """`receive` comes next."""
        assert not self._asked, f"{self._asked} has not been answered yet"
        command: dict[str, Any] = {"action": action, "entries": [], "memory": None}
        if bucket is not None:
            command["entries"] = [
                (one.name, str(one.dtype).removeprefix("torch."), one.shape, bucket.start_bytes + one.offset_bytes)
                for one in bucket.entries
            ]
        for rank, connection in self._connections.items():
            if bucket is not None:
                command["memory"] = self._memories[rank]
            try:
                send_message(connection, command)
            except OSError as error:
                raise EngineFailure(f"the engine's rank {rank} does not take `{action}`: {error}") from error
        self._asked = action

    def receive(self) -> list[Outcome]:
        """What came of the command that was sent."""
        action, self._asked = self._asked, ""
        assert action, "nothing was sent"
        outcomes: list[Outcome] = []
        problems = []
        for rank, connection in self._connections.items():
            try:
                answer = receive_message(connection)
            except (OSError, EOFError) as error:
                late = isinstance(error, TimeoutError)
                what = f"no answer within {self._deadline_seconds:g} s" if late else f"its scheduler is gone ({error})"
                raise EngineFailure(f"{action} on the engine's rank {rank}: {what}") from error
            if answer["error"] is not None:
                problems.append(f"{name_model(rank, answer['failed'])}: {answer['error']}")
            outcomes += [{**found, "rank": rank, "model": number} for number, found in enumerate(answer["models"])]
        if problems:
            raise EngineFailure(f"the engine could not {action} weights: {'; '.join(problems)}")
        return outcomes

    def close(self) -> None:
        """End the request and the update."""
        self.ask("end")
        self._disconnect()
        assert self._request is not None
        self._request.result(_JOIN_SECONDS)
        self._control.post("/end_weight_update", {})

    def abandon(self) -> None:
        """Give it up in whatever state it is. Never raises; the next session ends what this one leaves open."""
        self._disconnect()
        if self._request is not None:
            self._request.join(_JOIN_SECONDS)
            if self._request.is_alive():
                return  # a scheduler hangs: nothing else would be answered either
        with contextlib.suppress(EngineFailure):
            self._control.post("/end_weight_update", {})

    def _begin(self) -> None:
        try:
            self._control.post("/begin_weight_update", {"selector": "all"})
        except EngineFailure as failure:
            if "already open" not in str(failure):
                raise
            self._control.post("/end_weight_update", {})
            self._control.post("/begin_weight_update", {"selector": "all"})

    def _connect(self) -> None:
        """Have every scheduler call back. In an abstract name space: nothing is left behind, whoever dies."""
        token, address = secrets.token_hex(16), f"grpo_megatron-{secrets.token_hex(16)}"
        message = {"token": token, "address": address, "deadline_seconds": _SILENCE_SECONDS}
        ranks = range(len(self._memories))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("\0" + address)
            listening.listen()
            listening.settimeout(0.1)
            serve = [message | {"action": "serve", "rank": rank} for rank in ranks]
            self._request = _Request(
                lambda: self._control.post(
                    "/update_weights_from_tensor", update_body(serve), deadline_seconds=_REQUEST_SECONDS
                )
            )
            self._request.start()
            numbers = set()
            while len(self._connections) < len(ranks):
                numbers.add(self._accept(listening, token))
        if len(numbers) != 1:
            raise EngineFailure(f"the ranks of the engine have different numbers of models: {sorted(numbers)}")
        (self.num_models,) = numbers
        self._connections = dict(sorted(self._connections.items()))

    def _accept(self, listening: socket.socket, token: str) -> int:
        """The next scheduler; returns how many models it has."""
        end = time.monotonic() + self._deadline_seconds
        while time.monotonic() < end:
            assert self._request is not None
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                if self._request.is_alive():
                    continue
                self._request.result(0)
                raise EngineFailure("the engine's schedulers did not call back: see its log") from None
            connection.settimeout(self._deadline_seconds)
            with contextlib.suppress(OSError, EOFError, ValueError):
                hello = receive_message(connection)
                if secrets.compare_digest(str(hello.get("token")), token):
                    self._connections[hello["rank"]] = connection
                    return int(hello["num_models"])
            connection.close()
        missing = [str(rank) for rank in range(len(self._memories)) if rank not in self._connections]
        raise EngineFailure(
            f"no call from the engine's ranks {short_list(missing)} within {self._deadline_seconds:g} s"
        )

    def _disconnect(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}


class _Request(threading.Thread):
    """The request that lasts. Only HTTP: collectives and device work stay in the main thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True, name="sglang-weight-update")
        self._call = call
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:  # noqa: BLE001 raised where it is waited for
            self._error = error

    def result(self, seconds: float) -> None:
        """Wait for its end; raises what it raised."""
        self.join(seconds)
        if self.is_alive():
            raise EngineFailure(f"the engine did not end a weight update within {seconds:g} s")
        if self._error is not None:
            raise self._error


def update_body(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A request that brings each tensor-parallel rank its message, through all of its models."""
    return {
        "serialized_named_tensors": [serialize_message(json.dumps(message)) for message in messages],
        "load_format": RECEIVER,
        "selector": "all",
        "flush_cache": False,  # once, at the end
    }


def serialize_message(text: str) -> str:
    """A named tensor as SGLang's server takes it: the text is the name, and the tensor is empty."""
    return base64.b64encode(ForkingPickler.dumps([(text, torch.empty(0))])).decode()


def name_model(rank: int, number: int) -> str:
    """For messages."""
    model = "the policy" if number == 0 else f"drafter {number}"
    return f"{model} on rank {rank}"
