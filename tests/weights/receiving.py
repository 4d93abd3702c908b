"""A shared-memory receiver in a process of its own. Imports little, since every such process imports it."""

import multiprocessing
import time
from multiprocessing.connection import Connection

import torch

from grpo_megatron.weights.shared_memory import Request, SharedMemoryReceiver, SharedMemorySink

DEADLINE_SECONDS = 60.0


class _SlowReceiver(SharedMemoryReceiver):
    def __init__(self, connection: Connection, seconds: float) -> None:
        super().__init__(connection, deadline_seconds=DEADLINE_SECONDS, idle_seconds=DEADLINE_SECONDS)
        self._seconds = seconds

    def _take(self, request: Request) -> None:
        time.sleep(self._seconds)
        super()._take(request)


def _receive(connection: Connection, seconds: float) -> None:
    torch.set_num_threads(1)
    _SlowReceiver(connection, seconds).serve()


class ReceiverProcess:
    """The process, and the sink here that talks to it; `seconds` is how long it takes over each bucket."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_receive, args=(theirs, seconds), daemon=True)
        self.process.start()
        theirs.close()
        self.sink = SharedMemorySink(ours, deadline_seconds=DEADLINE_SECONDS)

    def end(self) -> int | None:
        """Close; returns the process's exit code."""
        self.sink.close()
        self.process.join(DEADLINE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(DEADLINE_SECONDS)
        return self.process.exitcode
