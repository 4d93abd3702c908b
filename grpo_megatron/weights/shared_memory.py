"""A WeightSink to a receiver in another process: one persistent shared buffer, and a connection for what to do.

Sender: `SharedMemorySink(connection)`; buckets are filled where the receiver reads them. Receiver, in the other
process: `SharedMemoryReceiver(connection).serve()`.
"""

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.shared_buffer import SharedBuffer
from grpo_megatron.weights.sink import Bucket, BucketEntry

_POLL_SECONDS = 0.2


class ReceiverFailure(RuntimeError):
    """The receiver said no, is gone, or did not answer in time."""


@dataclass(frozen=True)
class Request:
    """What the sender asks; the receiver answers every request with one `Reply` of the same number."""

    number: int
    kind: Literal["begin", "put", "commit", "abort", "version", "checksums", "close"]
    version: int = -1
    path: str = ""
    """`begin`: where the shared buffer is opened."""
    num_bytes: int = 0
    entries: tuple[BucketEntry, ...] = ()
    names: tuple[str, ...] = ()
    num_tensors: int = 0
    """`commit`: tensors that were sent since `begin`."""


@dataclass(frozen=True)
class Reply:
    number: int
    error: str | None = None
    value: Any = None


class SharedMemorySink:
    """Sending side; see `WeightSink`.

    Args:
        deadline_seconds: for every single answer of the receiver.
        is_alive: says whether the receiver's process runs; a closed connection is noticed without it.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        deadline_seconds: float = 120.0,
        is_alive: Callable[[], bool] | None = None,
    ) -> None:
        self._connection = connection
        self._deadline_seconds = deadline_seconds
        self._is_alive = is_alive
        self._buffer: SharedBuffer | None = None
        self._number = 0
        self._num_sent = 0
        self._lost: str | None = None
        _limit_sending(connection, deadline_seconds)

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """The shared buffer; replaces an earlier one. It is host memory, whatever the device."""
        buffer = SharedBuffer.create(num_bytes)
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = buffer
        return buffer.tensor

    def begin(self, version: int) -> None:
        buffer = self._buffer
        path, num_bytes = ("", 0) if buffer is None else (buffer.path, buffer.tensor.nbytes)
        self._num_sent = 0
        self._ask("begin", version=version, path=path, num_bytes=num_bytes)

    def put(self, bucket: Bucket) -> None:
        assert bucket.buffer is not None
        end = bucket.start_bytes + bucket.buffer.nbytes
        if self._buffer is None or self._buffer.tensor.nbytes < end:
            raise ValueError(
                f"the shared buffer is smaller than the {end} bytes of a bucket: call allocate before begin"
            )
        place = self._buffer.tensor[bucket.start_bytes : end]
        if bucket.buffer.data_ptr() != place.data_ptr():
            place.copy_(bucket.buffer)
        self._num_sent += len(bucket.entries)
        entries = tuple(
            replace(entry, offset_bytes=entry.offset_bytes + bucket.start_bytes) for entry in bucket.entries
        )
        self._ask("put", entries=entries, num_bytes=end)

    def settle(self) -> None:
        """Nothing: `put` has waited."""

    def compare(self, bucket: Bucket) -> dict[str, int]:
        """The receiver keeps what it was sent: its own copies are looked at, not the bucket."""
        return self.checksums([entry.name for entry in bucket.entries])

    def commit(self) -> None:
        self._ask("commit", num_tensors=self._num_sent)

    def abort(self) -> None:
        self._ask("abort")

    def version(self) -> int:
        return self._ask("version")

    def checksums(self, names: Sequence[str]) -> dict[str, int]:
        """Of the receiver's copies, computed by it."""
        return self._ask("checksums", names=tuple(names))

    def close(self) -> None:
        """Ask the receiver to end and forget the buffer. Nothing happens if the receiver is gone."""
        try:
            self._ask("close")
        except ReceiverFailure:
            pass
        finally:
            self._connection.close()
            if self._buffer is not None:
                self._buffer.close()
                self._buffer = None

    def _ask(self, kind: Any, **values: Any) -> Any:
        """Send one request and wait for its answer.

        Raises:
            ReceiverFailure: refused, gone, or late.
        """
        self._number += 1
        what = f"the weight receiver's answer to `{kind}`"
        if self._lost is not None:
            raise ReceiverFailure(self._lost)
        try:
            self._connection.send(Request(self._number, kind, **values))
            reply = self._wait(what)
        except BlockingIOError as error:
            # Part of the request may be on its way: nothing that follows on this connection could be understood.
            self._lost = f"the weight receiver did not read `{kind}` within {self._deadline_seconds:g} s"
            raise ReceiverFailure(self._lost) from error
        except (EOFError, OSError) as error:
            self._lost = f"the weight receiver is gone; waited for {what}"
            raise ReceiverFailure(self._lost) from error
        if reply.error is not None:
            raise ReceiverFailure(f"the weight receiver refused `{kind}`: {reply.error}")
        return reply.value

    def _wait(self, what: str) -> Reply:
        end = time.monotonic() + self._deadline_seconds
        while time.monotonic() < end:
            if self._connection.poll(min(_POLL_SECONDS, self._deadline_seconds)):
                reply: Reply = self._connection.recv()
                if reply.number == self._number:
                    return reply
                continue  # the late answer to a request that was given up
            if self._is_alive is not None and not self._is_alive():
                raise ReceiverFailure(f"the weight receiver's process ended; waited for {what}")
        raise ReceiverFailure(f"{what} did not come within {self._deadline_seconds:g} s")


def _limit_sending(connection: Connection, seconds: float) -> None:
    """A receiver that hangs stops reading; the sender must notice that too."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


class SharedMemoryReceiver:
    """Receiving side: copies tensors out of the shared buffer and keeps them.

    Args:
        on_commit: called with all tensors when a version is whole, before it is served.
        deadline_seconds: between two requests of one publish.
        idle_seconds: between two publishes.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        on_commit: Callable[[Mapping[str, torch.Tensor]], None] | None = None,
        deadline_seconds: float = 120.0,
        idle_seconds: float = 86400.0,
    ) -> None:
        self._connection = connection
        self._on_commit = on_commit
        self._deadline_seconds, self._idle_seconds = deadline_seconds, idle_seconds
        self._buffer: SharedBuffer | None = None
        self._publishing: int | None = None
        self._arrived: set[str] = set()
        self.tensors: dict[str, torch.Tensor] = {}
        self.version = -1

    def serve(self) -> None:
        """Answer requests until the sender closes or is gone.

        Raises:
            TimeoutError: no request within the deadline.
        """
        while True:
            in_publish = self._publishing is not None
            seconds = self._deadline_seconds if in_publish else self._idle_seconds
            try:
                if not self._connection.poll(seconds):
                    what = f"the next request of publish {self._publishing}" if in_publish else "the next publish"
                    raise TimeoutError(f"waited {seconds:g} s for {what}")
                request: Request = self._connection.recv()
                self._connection.send(self._answer(request))
            except (EOFError, ConnectionError):
                return
            if request.kind == "close":
                return

    def _answer(self, request: Request) -> Reply:
        try:
            return Reply(request.number, value=self._do(request))
        except Exception as error:  # noqa: BLE001 the sender decides what a failure means
            return Reply(request.number, error=f"{type(error).__name__}: {error}")

    def _do(self, request: Request) -> Any:
        match request.kind:
            case "begin":
                self._begin(request)
            case "put":
                self._take(request)
            case "commit":
                self._commit(request)
            case "abort":
                self.version, self._publishing = -1, None
            case "version":
                return self.version
            case "checksums":
                if unknown := [name for name in request.names if name not in self.tensors]:
                    raise KeyError(f"never received: {', '.join(unknown)}")
                return {name: checksum(self.tensors[name]) for name in request.names}
            case "close":
                self._buffer = None
        return None

    def _begin(self, request: Request) -> None:
        # From here on old and new tensors mix: there is no whole version until commit.
        self.version, self._publishing = -1, request.version
        self._arrived.clear()
        if request.path and (self._buffer is None or not self._buffer.is_at(request.path)):
            self._buffer = SharedBuffer.open(request.path, request.num_bytes)

    def _take(self, request: Request) -> None:
        """Copy one bucket out; the sender reuses the buffer after the answer."""
        if self._publishing is None or self._buffer is None:
            raise RuntimeError("put without begin")
        for entry in request.entries:
            if entry.end_bytes > request.num_bytes or entry.name in self._arrived:
                raise ValueError(f"{entry.name}: outside the bucket, or sent twice")
            part = entry.view(self._buffer.tensor)
            own = self.tensors.get(entry.name)
            if own is not None and (own.shape, own.dtype) == (part.shape, part.dtype):
                own.copy_(part)
            else:
                self.tensors[entry.name] = part.clone()
            self._arrived.add(entry.name)

    def _commit(self, request: Request) -> None:
        if self._publishing is None:
            raise RuntimeError("commit without begin")
        if len(self._arrived) != request.num_tensors or set(self.tensors) != self._arrived:
            old = sorted(set(self.tensors) - self._arrived)
            raise ValueError(f"{len(self._arrived)} of {request.num_tensors} tensors arrived; still old: {old}")
        if self._on_commit is not None:
            self._on_commit(self.tensors)
        self.version, self._publishing = self._publishing, None
