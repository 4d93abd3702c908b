"""Brings a new policy version to the engines, bucket by bucket, with all ranks agreeing after each bucket."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from grpo_megatron.parallel.collectives import agree
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.gather import WalkEntry, WeightWalk
from grpo_megatron.weights.sink import Bucket, BucketEntry, WeightSink

DEFAULT_BUCKET_BYTES = 256 * 1024**2
_ALIGNMENT = 64  # bytes; a tensor of any dtype may be viewed in place
_NUM_SAMPLED = 8


@dataclass(frozen=True)
class PublishReport:
    """What one publish did; the same on every rank but for the seconds.

    Example:
        >>> PublishReport(version=3, num_bytes=269_000_000, seconds=0.9, num_buckets=2, num_compared=8).version
        3
    """

    version: int
    num_bytes: int
    seconds: float
    num_buckets: int
    num_compared: int
    """Tensors whose checksums were found equal on both sides."""


@dataclass(frozen=True)
class BucketPlan:
    entries: tuple[BucketEntry, ...]
    num_bytes: int


class Publisher:
    """Publishes the same chunks again and again through one persistent buffer.

    Args:
        sink: on the leader rank of a rollout group; None on the others.
        allocate: makes the buffer, a flat uint8 tensor of this many bytes (a sink may offer memory that it shares with
            its receiver); default: on the model's device. Called once. Ranks without a sink keep a buffer only if
            they give it.
    """

    def __init__(
        self,
        walk: WeightWalk,
        sink: WeightSink | None,
        groups: Groups,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        allocate: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self._walk, self._sink, self._groups = walk, sink, groups
        self._plans = plan_buckets(walk.entries, bucket_bytes)
        self._names = [entry.name for entry in walk.entries]
        largest = max(plan.num_bytes for plan in self._plans)
        self._buffer: torch.Tensor | None = None
        if allocate is not None:
            self._buffer = allocate(largest)
        elif sink is not None:
            self._buffer = torch.empty(largest, dtype=torch.uint8, device=walk.device)

    @property
    def num_buffer_bytes(self) -> int:
        """Memory that stays between publishes on this rank."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def publish(self, version: int, *, compare: Literal["sample", "all"] = "sample") -> PublishReport:
        """Send every tensor and make the sinks serve `version`. Collective over the world.

        Raises:
            RankFailure: on every rank, if a sink of any rank failed or a checksum differs; every sink was aborted then
                and serves no version until the next publish.
        """
        start = time.monotonic()
        chosen = set(self._names) if compare == "all" else set(sample_names(self._names, version))
        try:
            checksums = self._send(version, chosen)
            self._agree(lambda sink: sink.commit(), f"publish of version {version}: commit")
            self._agree(lambda sink: _compare(sink, version, checksums), f"publish of version {version}: comparison")
        except BaseException:
            self._abort()
            raise
        num_bytes = sum(entry.num_bytes for entry in self._walk.entries)
        return PublishReport(version, num_bytes, time.monotonic() - start, len(self._plans), len(chosen))

    def compare_all(self, version: int) -> int:
        """Compare every tensor with the receiver's, without sending. Collective over the world; returns their number.

        Raises:
            RankFailure: on every rank, naming the tensors that differ.
        """
        checksums = {entry.name: checksum(tensor) for entry, tensor in self._walk.tensors() if self._sink is not None}
        self._agree(lambda sink: _compare(sink, version, checksums), f"comparison of version {version}")
        return len(self._names)

    def _send(self, version: int, chosen: set[str]) -> dict[str, int]:
        """All buckets; returns this side's checksums of the chosen tensors (on ranks with a sink)."""
        self._agree(lambda sink: sink.begin(version), f"publish of version {version}: begin")
        checksums: dict[str, int] = {}
        tensors = self._walk.tensors()
        for index, plan in enumerate(self._plans):
            self._fill(plan, tensors, chosen, checksums)
            # The buffer is filled again only after every rank has heard that this bucket was read.
            what = f"publish of version {version}: bucket {index + 1} of {len(self._plans)}"
            self._agree(lambda sink, i=index, p=plan: sink.put(self._bucket(i, p)), what)  # type: ignore[misc]
        return checksums

    def _fill(
        self,
        plan: BucketPlan,
        tensors: Iterator[tuple[WalkEntry, torch.Tensor]],
        chosen: set[str],
        checksums: dict[str, int],
    ) -> None:
        """Copy the next tensors of the walk into the buffer. Collective over tensor and pipeline groups."""
        for entry in plan.entries:
            walked, tensor = next(tensors)
            assert walked.name == entry.name, (walked.name, entry.name)
            if self._buffer is not None:
                target = self._buffer[entry.offset_bytes : entry.offset_bytes + walked.num_bytes]
                target.copy_(tensor.reshape(-1).view(torch.uint8))
            if self._sink is not None and entry.name in chosen:
                checksums[entry.name] = checksum(tensor)

    def _bucket(self, index: int, plan: BucketPlan) -> Bucket:
        assert self._buffer is not None
        return Bucket(index, plan.entries, self._buffer[: plan.num_bytes])

    def _agree(self, action: Callable[[WeightSink], Any], what: str) -> None:
        """Do this with the sink, if this rank has one, and hear from all. Collective over the world."""
        error = None
        if self._sink is not None:
            try:
                action(self._sink)
            except Exception as problem:  # noqa: BLE001 whatever it is, the other ranks wait to hear of it
                error = f"{type(problem).__name__}: {problem}"
        agree(error, self._groups.world, what)

    def _abort(self) -> None:
        """The publish has failed already, with an error that says why: one of the abort's own adds nothing."""
        if self._sink is not None:
            with contextlib.suppress(Exception):
                self._sink.abort()


def plan_buckets(entries: Sequence[WalkEntry], bucket_bytes: int) -> tuple[BucketPlan, ...]:
    """Cut the walk into runs of at most `bucket_bytes`; a larger tensor has a bucket to itself."""
    assert entries and bucket_bytes > 0
    plans: list[BucketPlan] = []
    current: list[BucketEntry] = []
    end = 0
    for entry in entries:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        if current and offset + entry.num_bytes > bucket_bytes:
            plans.append(BucketPlan(tuple(current), end))
            current, offset = [], 0
        current.append(BucketEntry(entry.name, entry.dtype, entry.shape, offset))
        end = offset + entry.num_bytes
    return (*plans, BucketPlan(tuple(current), end))


def sample_names(names: Sequence[str], version: int) -> list[str]:
    """Tensors to compare after publishing this version: the same choice on every rank, another for every version."""
    return random.Random(version).sample(list(names), min(_NUM_SAMPLED, len(names)))


def _compare(sink: WeightSink, version: int, checksums: dict[str, int]) -> None:
    served = sink.version()
    if served != version:
        raise ValueError(f"the receiver serves version {served}, not {version}")
    theirs = sink.checksums(list(checksums))
    different = [name for name, value in checksums.items() if theirs.get(name) != value]
    if different:
        raise ValueError(f"checksums differ for {len(different)} of {len(checksums)} tensors: {', '.join(different)}")
