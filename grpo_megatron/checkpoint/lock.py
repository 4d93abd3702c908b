"""One job per folder. Owns the lock file; knows nothing of what the folder holds. Imports no torch."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from grpo_megatron.checkpoint.base import CheckpointError

LOCK_NAME = ".lock"


class FolderLock:
    """Held from construction to `release()` or the death of the process, whichever comes first.

    An advisory lock of the operating system on a file that is never deleted, so that a killed job leaves nothing to
    clean up; NFS passes it between machines. The file's text only says who holds it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._read_holder()
            self._close()
            raise CheckpointError(
                f"{folder} is in use by another job ({holder}). Stop it, or choose another run.name or run.folder"
            ) from None
        except OSError:
            self._close()
            raise
        # A forked child shares the lock with its parent and would hold it after the parent's death.
        os.register_at_fork(after_in_child=self._close)
        holder_now = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder_now).encode(), 0)
        except OSError:
            pass  # a full disk: the lock itself holds, only the name of its holder is missing

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def release(self) -> None:
        self._close()

    def _read_holder(self) -> str:
        assert self._descriptor is not None
        try:
            holder = json.loads(os.pread(self._descriptor, 4096, 0))
            return f"process {holder['pid']} on host {holder['host']} since {holder['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "its name is not in the lock file"

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
