"""Where bytes wait while they are off the device: pinned host memory next to a GPU, a file next to a CPU.

A `FarSpace` belongs to one group and is used again at every move, so that cycling groups costs neither memory nor
file descriptors after the first time.
"""

import bisect
import ctypes
import os
import tempfile
from pathlib import Path
from typing import Protocol

import torch

from grpo_megatron.platform.device import Platform
from grpo_megatron.platform.heap import return_free_memory

_MAX_SLAB_BYTES = 1 << 30
_TRANSFER_BYTES = 64 << 20


class FarSpace(Protocol):
    def reserve(self, num_bytes: int) -> None:
        """Make sure that offsets below `num_bytes` can be written. Fails before anything has left the device."""

    def write(self, source: torch.Tensor, offset: int) -> None:
        """uint8 [bytes] on the device -> far. The source may be freed after `wait`."""

    def read(self, target: torch.Tensor, offset: int) -> None:
        """far -> uint8 [bytes] on the device, usable after `wait`."""

    def wait(self) -> None: ...
    def close(self) -> None: ...


class HostSpace:
    """Page-locked host memory. Slabs have sizes of powers of two, since torch's pinned allocator rounds up to them."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._slabs: list[torch.Tensor] = []
        self._starts: list[int] = []
        self._reserved = 0

    def reserve(self, num_bytes: int) -> None:
        while self._reserved < num_bytes:
            size = min(_MAX_SLAB_BYTES, 1 << (num_bytes - self._reserved - 1).bit_length())
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            self._starts.append(self._reserved)
            self._reserved += size

    def write(self, source: torch.Tensor, offset: int) -> None:
        for slab, mine in self._pieces(source, offset):
            slab.copy_(mine, non_blocking=True)

    def read(self, target: torch.Tensor, offset: int) -> None:
        for slab, mine in self._pieces(target, offset):
            mine.copy_(slab, non_blocking=True)

    def wait(self) -> None:
        self._platform.synchronize()

    def close(self) -> None:
        self._slabs.clear()
        self._starts.clear()
        self._reserved = 0

    def _pieces(self, tensor: torch.Tensor, offset: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of equally long runs in a slab and in the tensor."""
        assert offset + tensor.numel() <= self._reserved
        pieces, done = [], 0
        while done < tensor.numel():
            index = bisect.bisect_right(self._starts, offset + done) - 1
            start = offset + done - self._starts[index]
            size = min(tensor.numel() - done, self._slabs[index].numel() - start)
            pieces.append((self._slabs[index][start : start + size], tensor[done : done + size]))
            done += size
        return pieces


class FileSpace:
    """A nameless file: it vanishes with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="offload-")
        os.unlink(name)
        self._descriptor: int | None = descriptor
        self._reserved = 0

    def reserve(self, num_bytes: int) -> None:
        if num_bytes <= self._reserved:
            return
        try:
            os.posix_fallocate(self._file(), 0, num_bytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"memory_management.far_folder: {self._folder} has no room for {num_bytes} bytes of offloaded tensors "
                f"({error.strerror}); free some or choose another folder",
            ) from error
        self._reserved = num_bytes

    # Plain reads and writes, not a mapping: pages of a mapping count as this process's memory.
    def write(self, source: torch.Tensor, offset: int) -> None:
        view, done = _bytes_of(source), 0
        while done < len(view):
            done += os.pwrite(self._file(), view[done : done + _TRANSFER_BYTES], offset + done)

    def read(self, target: torch.Tensor, offset: int) -> None:
        view, done = _bytes_of(target), 0
        while done < len(view):
            count = os.preadv(self._file(), [view[done : done + _TRANSFER_BYTES]], offset + done)
            assert count > 0, "the offload file is shorter than what was written to it"
            done += count

    def wait(self) -> None:
        """Reads and writes are done when they return."""

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _file(self) -> int:
        assert self._descriptor is not None, "the far space is closed"
        return self._descriptor


def release_freed_memory(platform: Platform) -> None:
    """Give what was just freed to whoever else wants it: another process on the device, or the operating system."""
    if platform.kind == "cuda":
        torch.cuda.empty_cache()
    else:
        return_free_memory()


def make_far_space(platform: Platform, folder: Path) -> HostSpace | FileSpace:
    """The far tier of this machine; `folder` is used on a CPU only."""
    return HostSpace(platform) if platform.kind == "cuda" else FileSpace(folder)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory without a copy. `Tensor.numpy()` would do, but marks the storage as not resizable."""
    assert tensor.dtype == torch.uint8 and tensor.is_contiguous() and tensor.device.type == "cpu"
    return memoryview((ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())).cast("B")
