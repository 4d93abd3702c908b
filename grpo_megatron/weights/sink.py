"""Where published weights go: the receiving side of `publish`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class BucketEntry:
    """One whole HF tensor inside a bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True)
class Bucket:
    """A run of HF tensors in one flat buffer; the buffer is used again as soon as `put` returned on all ranks."""

    index: int
    entries: tuple[BucketEntry, ...]
    buffer: torch.Tensor  # uint8 [bytes]


class WeightSink(Protocol):
    """Called on the leader rank of a rollout group only; raises on failure, and publish aborts on all ranks."""

    def begin(self, version: int) -> None: ...

    def put(self, bucket: Bucket) -> None:
        """Hand over one bucket. Must not return before the receiver has read it."""

    def commit(self) -> None: ...

    def abort(self) -> None: ...

    def version(self) -> int:
        """The version that the receiver serves now; -1 while it has none that is whole."""

    def checksums(self, names: Sequence[str]) -> dict[str, int]:
        """Checksum of the receiver's copy of these tensors, computed by the receiver."""
