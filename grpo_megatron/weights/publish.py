"""Brings a new policy version to the engines, bucket by bucket, with all ranks agreeing after each bucket."""

import contextlib
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from grpo_megatron.parallel.collectives import agree
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.gather import WalkEntry, WeightWalk
from grpo_megatron.weights.naming import short_list
from grpo_megatron.weights.sink import Bucket, BucketEntry, WeightSink

DEFAULT_BUCKET_BYTES = 256 * 1024**2
_ALIGNMENT = 64  # bytes; a tensor of any dtype may be viewed in place
_NUM_SAMPLED = 8


@dataclass(frozen=True)
class PublishReport:
    """What one publish did.

    Example:
        >>> PublishReport(3, 269_000_000, 0.9, num_buckets=2, num_compared=8, peak_extra_bytes=256_000_000).version
        3
    """

    version: int
    num_bytes: int
    """Bytes of the model in HF's form: what every engine received."""
    seconds: float
    num_buckets: int
    num_compared: int
    """Tensors that were sent a second time and found equal on both sides."""
    peak_extra_bytes: int
    """Memory of this rank that publishing took beside the parameters: the bucket, and what was gathered for it."""


@dataclass(frozen=True)
class BucketPlan:
    """The tensors of a bucket, the pieces of the walk that they come from, and where the bucket lies in the buffer."""

    pieces: tuple[int, ...]
    entries: tuple[BucketEntry, ...]
    start_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return self.entries[-1].end_bytes

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + self.num_bytes

    def overlaps(self, other: "BucketPlan") -> bool:
        return self.start_bytes < other.end_bytes and other.start_bytes < self.end_bytes


class Publisher:
    """Publishes the same chunks again and again through one persistent buffer.

    While the receivers read one half of it, the other is filled.

    Args:
        sink: on the ranks that hand something to an engine (see `WeightSink`); None on the others.
        bucket_bytes: size of the buffer. The tensors of one parameter are never parted: one that is larger than
            half of the buffer takes all of it, and one that is larger than the buffer makes it larger.
    """

    def __init__(
        self,
        walk: WeightWalk,
        sink: WeightSink | None,
        groups: Groups,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self._walk, self._sink, self._groups = walk, sink, groups
        self._bucket_bytes = bucket_bytes
        self._plans = plan_buckets(walk.pieces, bucket_bytes)
        self._names = [entry.name for entry in walk.entries]
        self._buffer = None if sink is None else sink.allocate(_needed_bytes(self._plans, bucket_bytes), walk.device)
        self._takes_part = False
        self._problem: str | None = None

    @property
    def num_buffer_bytes(self) -> int:
        """Memory that stays between publishes on this rank."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def publish(
        self, version: int, *, compare: Literal["sample", "all"] = "sample", here: bool = True
    ) -> PublishReport:
        """Send every tensor and make the sinks serve `version`. Collective over the world.

        Before the version is served, some tensors, or all, are sent again and compared. `here` False leaves this
        rank's sink as it is: an engine that lost its weights gets them while the others keep theirs. Ranks of one
        engine say the same, others may differ.

        Raises:
            RankFailure: on every rank, if a sink of any rank failed or something differs; every sink that took part
                was aborted then and serves no version until the next publish.
        """
        start = time.monotonic()
        self._takes_part = here
        what = f"publish of version {version}"
        chosen = self._names if compare == "all" else sample_names(self._names, version)
        try:
            self._agree(lambda sink: sink.begin(version), f"{what}: begin")
            self._send_all(what)
            self._compare(chosen, f"{what}: comparison")
            self._agree(lambda sink: sink.commit(), f"{what}: commit")
            self._agree(lambda sink: _check_version(sink, version), f"{what}: version afterwards")
        except BaseException:
            self._abort()
            raise
        return PublishReport(
            version=version,
            num_bytes=sum(entry.num_bytes for entry in self._walk.entries),
            seconds=time.monotonic() - start,
            num_buckets=len(self._plans),
            num_compared=len(chosen),
            peak_extra_bytes=self.num_buffer_bytes + self._walk.peak_gathering_bytes,
        )

    def compare_all(self, version: int) -> int:
        """Compare every tensor with the receivers'; returns their number. Collective over the world.

        Raises:
            RankFailure: on every rank, naming the tensors that differ. The sinks go on serving the version.
        """
        self._takes_part = True
        what = f"comparison of version {version}"
        self._agree(lambda sink: _check_version(sink, version), what)
        self._compare(self._names, what)
        return len(self._names)

    def _send_all(self, what: str) -> None:
        """Every bucket, the next one being filled while one is read. Collective over the world."""
        flying: BucketPlan | None = None
        for index, plan in enumerate(self._plans):
            if flying is not None and flying.overlaps(plan):
                self._settle(f"{what}: bucket {index}")
                flying = None
            self._fill(plan)
            if flying is not None:
                self._settle(f"{what}: bucket {index}")
            bucket = self._bucket(index, plan)
            self._problem = self._attempt(lambda sink, bucket=bucket: sink.put(bucket))  # type: ignore[misc]
            flying = plan
        self._settle(f"{what}: bucket {len(self._plans)}")

    def _settle(self, what: str) -> None:
        """Memory is filled again only after every rank has heard that it was read. Collective over the world."""
        problem, self._problem = self._problem, None
        agree(problem or self._attempt(lambda sink: sink.settle()), self._groups.world, what)

    def _compare(self, names: Sequence[str], what: str) -> None:
        """Send these tensors once more, for comparison only. Collective over the world."""
        plans = plan_buckets(self._walk.pieces, self._bucket_bytes, names=set(names))
        for index, plan in enumerate(plans):
            self._fill(plan)
            bucket = self._bucket(index, plan)
            part = f"{what}, part {index + 1} of {len(plans)}"
            self._agree(lambda sink, bucket=bucket: _compare_bucket(sink, bucket), part)  # type: ignore[misc]

    def _bucket(self, index: int, plan: BucketPlan) -> Bucket:
        buffer = None if self._buffer is None else self._buffer[plan.start_bytes : plan.end_bytes]
        return Bucket(index, plan.entries, buffer, plan.start_bytes)

    def _fill(self, plan: BucketPlan) -> None:
        """Copy the plan's tensors into the buffer, if there is one. Collective over tensor and pipeline groups."""
        wanted: dict[str, torch.Tensor] = {}
        if self._buffer is not None and self._takes_part:
            memory = self._buffer[plan.start_bytes : plan.end_bytes]
            wanted = {entry.name: entry.view(memory) for entry in plan.entries}
        for piece in plan.pieces:
            targets = [wanted.get(entry.name) for entry in self._walk.pieces[piece]]
            self._walk.copy_piece(piece, targets if wanted else None)

    def _agree(self, action: Callable[[WeightSink], Any], what: str) -> None:
        """Do this with the sink and hear from all. Collective over the world."""
        agree(self._attempt(action), self._groups.world, what)

    def _attempt(self, action: Callable[[WeightSink], Any]) -> str | None:
        """Do this with the sink, if this rank has one that takes part; returns what went wrong."""
        if self._sink is not None and self._takes_part:
            try:
                action(self._sink)
            except Exception as problem:  # noqa: BLE001 whatever it is, the other ranks wait to hear of it
                return f"{type(problem).__name__}: {problem}"
        return None

    def _abort(self) -> None:
        """The publish has failed already, with an error that says why: one of the abort's own adds nothing."""
        if self._sink is not None and self._takes_part:
            with contextlib.suppress(Exception):
                self._sink.abort()


def plan_buckets(
    pieces: Sequence[Sequence[WalkEntry]], bucket_bytes: int, *, names: Collection[str] | None = None
) -> tuple[BucketPlan, ...]:
    """Cut the walk, or only these names of it, into runs of whole pieces that fill halves of the buffer by turns.

    A larger piece has a run to itself, from the beginning of the buffer on.
    """
    half = _half(bucket_bytes)
    plans: list[BucketPlan] = []
    numbers: list[int] = []
    entries: list[BucketEntry] = []

    def finish() -> None:
        previous = plans[-1] if plans else None
        is_second = previous is not None and previous.end_bytes <= half and entries[-1].end_bytes <= half
        plans.append(BucketPlan(tuple(numbers), tuple(entries), half if is_second else 0))

    for number, piece in enumerate(pieces):
        kept = [entry for entry in piece if names is None or entry.name in names]
        if not kept:
            continue
        placed = _place(kept, entries[-1].end_bytes if entries else 0)
        if entries and placed[-1].end_bytes > half:
            finish()
            numbers, entries = [], []
            placed = _place(kept, 0)
        numbers.append(number)
        entries += placed
    assert entries, "nothing to send"
    finish()
    return tuple(plans)


def _half(bucket_bytes: int) -> int:
    return max(_ALIGNMENT, bucket_bytes // 2 // _ALIGNMENT * _ALIGNMENT)


def _needed_bytes(plans: Sequence[BucketPlan], bucket_bytes: int) -> int:
    """Of the buffer, for all of the walk and for every part of it."""
    largest = max(plan.num_bytes for plan in plans)
    return largest if len(plans) == 1 else max(largest, 2 * _half(bucket_bytes))


def _place(entries: Sequence[WalkEntry], start: int) -> list[BucketEntry]:
    """One after the other from `start` on, each at a multiple of the alignment."""
    placed = []
    for entry in entries:
        placed.append(BucketEntry(entry.name, entry.dtype, entry.shape, -(-start // _ALIGNMENT) * _ALIGNMENT))
        start = placed[-1].end_bytes
    return placed


def sample_names(names: Sequence[str], version: int) -> list[str]:
    """Tensors to compare when publishing this version: the same choice on every rank, another for every version."""
    return random.Random(version).sample(list(names), min(_NUM_SAMPLED, len(names)))


def _compare_bucket(sink: WeightSink, bucket: Bucket) -> None:
    theirs = sink.compare(bucket)
    if theirs is None:
        return
    assert bucket.buffer is not None
    ours = {entry.name: checksum(entry.view(bucket.buffer)) for entry in bucket.entries}
    different = [name for name, value in ours.items() if theirs.get(name) != value]
    if different:
        raise ValueError(f"checksums differ for {len(different)} of {len(ours)} tensors: {short_list(different)}")


def _check_version(sink: WeightSink, version: int) -> None:
    served = sink.version()
    if served != version:
        raise ValueError(f"the receiver serves version {served}, not {version}")
