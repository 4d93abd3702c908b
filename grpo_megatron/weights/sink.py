"""Where published weights go: the receiving side of `publish`."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch


@dataclass(frozen=True)
class BucketEntry:
    """One whole HF tensor inside a bucket.

    Example:
        >>> BucketEntry("model.norm.weight", torch.bfloat16, (64,), offset_bytes=128).end_bytes
        256
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor where it lies in a buffer of bytes."""
        return buffer[self.offset_bytes : self.end_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """A run of HF tensors in flat memory, which is used again as soon as `settle` returned on all ranks."""

    index: int
    entries: tuple[BucketEntry, ...]
    """Offsets are those in `buffer`."""
    buffer: torch.Tensor | None
    """uint8 [bytes]; None on a rank whose sink wanted no memory."""
    start_bytes: int = 0
    """Where `buffer` begins in the memory that the sink allocated."""


class WeightSink(Protocol):
    """Called on the ranks of a rollout group that have one: the leader, or all where each hands over its own memory.

    Every method raises on failure, and the publisher then aborts on all ranks. A sink may talk to the other ranks of
    its group in every method but `settle`, `abort` and `version`; it then must get there on each of them whatever
    fails.
    """

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor | None:
        """Memory for buckets of at most `num_bytes` from a model on `device`: uint8 [num_bytes]. Called once.

        None if this rank need not fill any: its buckets come without a buffer.
        """

    def begin(self, version: int) -> None:
        """From here on old and new tensors mix: the receiver has no version until `commit`."""

    def put(self, bucket: Bucket) -> None:
        """Hand over one bucket; may return while the receiver still reads it. One at a time: `settle` comes next."""

    def settle(self) -> None:
        """Return when the receiver has read what was put."""

    def compare(self, bucket: Bucket) -> Mapping[str, int] | None:
        """Checksums of what the receiver has for these tensors, computed by it; None on a rank that asks nobody.

        Raises if the receiver can tell that what it uses is not what the bucket holds.
        """

    def commit(self) -> None: ...

    def abort(self) -> None:
        """Give up the version that was begun, if any. The receiver has none until the next publish."""

    def version(self) -> int:
        """The version that the receiver serves now; -1 while it has none that is whole."""
