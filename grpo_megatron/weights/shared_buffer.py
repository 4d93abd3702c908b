"""Bytes in memory that processes of one machine share, without a name in any file system.

The creating process hands out `path`, through which others of the same user open the same memory while it lives.
Nothing is left behind by whichever process dies in whatever way, and the size of /dev/shm is no limit.
"""

import mmap
import os

import torch


class SharedBuffer:
    """One block of shared memory, mapped here.

    Use `create` in the process that owns it and `open` in the others.
    """

    _descriptor: int | None = None
    """Held open in the process that owns it: closing it takes the path away."""

    def __init__(self, path: str, descriptor: int, num_bytes: int) -> None:
        self.path = path
        self._identity = _identity(descriptor)
        # Populated: the pages were reserved already, and a fault for each of them would cost more than copying it.
        self._map = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)  # uint8 [num_bytes]

    @classmethod
    def create(cls, num_bytes: int) -> "SharedBuffer":
        """Reserve the memory now.

        Raises:
            OSError: the machine does not have it.
        """
        available = _available_bytes()
        if num_bytes > available:
            # The kernel would try, and kill whatever it likes when there is no more.
            raise OSError(
                f"cannot reserve {num_bytes} bytes of shared memory, {available} are available: make the buckets "
                "smaller"
            )
        descriptor = os.memfd_create("grpo_megatron-weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            buffer = cls(f"/proc/{os.getpid()}/fd/{descriptor}", descriptor, num_bytes)
        except OSError:
            os.close(descriptor)
            raise
        buffer._descriptor = descriptor
        return buffer

    @classmethod
    def open(cls, path: str, num_bytes: int) -> "SharedBuffer":
        """Map the memory of another process, which must be alive."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if (size := os.fstat(descriptor).st_size) != num_bytes:
                raise ValueError(f"{path} has {size} bytes, not {num_bytes}")
            return cls(path, descriptor, num_bytes)
        finally:
            os.close(descriptor)

    def is_at(self, path: str) -> bool:
        """Is the memory at this path the one that is mapped here? A path may come to mean another one."""
        try:
            status = os.stat(path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def close(self) -> None:
        """Nobody can open it any more; the memory lives until all who mapped it have let go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _available_bytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
