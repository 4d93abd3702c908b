"""The shared store: counters and small texts between ranks, every wait with a deadline. Never payloads."""

import contextlib
import os
import signal
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from grpo_megatron.parallel.errors import RankFailure

STACKS_SIGNAL = signal.SIGUSR1
"""A rank that gets it writes what each of its threads is doing."""


class SharedStore:
    """One client of the run's store. A key is used for one purpose and one time, so that steps never meet."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        store.set(f"process/rank-{rank}", f"{socket.gethostname()} {os.getpid()}")

    def add(self, key: str, amount: int) -> int:
        """Add to a counter atomically; returns its new value."""
        return self._store.add(key, amount)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def get(self, key: str, deadline_seconds: float) -> str:
        """Wait for the key.

        Raises:
            TimeoutError: nobody has set it in time.
        """
        try:
            self._store.wait([key], timedelta(seconds=deadline_seconds))
        except dist.DistStoreError as error:
            raise TimeoutError(f"{key}: not set within {deadline_seconds:.0f} s") from error
        return self._store.get(key).decode()

    def fail(self, key: str, message: str) -> None:
        """Tell the ranks that wait in `meet` for this key that this rank will not come."""
        self._store.set(f"{key}/failed", f"rank {self._rank}: {message}")

    def meet(self, key: str, *, what: str, deadline_seconds: float, poll_seconds: float = 0.02) -> None:
        """Wait until every rank has come here, polling, without a collective.

        Raises:
            RankFailure: a rank has called `fail` for this key.
            TimeoutError: naming the ranks that are missing.
        """
        self._store.set(f"{key}/rank-{self._rank}", "here")
        self.add(f"{key}/count", 1)
        end = time.monotonic() + deadline_seconds
        while self.add(f"{key}/count", 0) < self._world_size:
            if self._store.check([f"{key}/failed"]):
                raise RankFailure(f"{what}: {self._store.get(f'{key}/failed').decode()}")
            if time.monotonic() > end:
                missing = [r for r in range(self._world_size) if not self._store.check([f"{key}/rank-{r}"])]
                self._ask_for_stacks(missing)
                raise TimeoutError(
                    f"{what}: ranks {missing} did not arrive within {deadline_seconds:.0f} s; "
                    f"what those of this machine were doing is in logs/stacks-rank-N.log"
                )
            time.sleep(poll_seconds)

    def _ask_for_stacks(self, ranks: list[int]) -> None:
        """Have the ranks of this machine write their stacks, wherever they hang: see `utils.logging.dump_stacks_on`."""
        for rank in ranks:
            if not self._store.check([f"process/rank-{rank}"]):
                continue
            host, process_id = self._store.get(f"process/rank-{rank}").decode().split()
            if host == socket.gethostname() and int(process_id) != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process_id), STACKS_SIGNAL)
