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
    """The tensors of one bucket, and the pieces of the walk that they come from."""

    pieces: tuple[int, ...]
    entries: tuple[BucketEntry, ...]

    @property
    def num_bytes(self) -> int:
        return self.entries[-1].end_bytes


class Publisher:
    """Publishes the same chunks again and again through one persistent buffer.

    Args:
        sink: on the ranks that hand something to an engine (see `WeightSink`); None on the others.
        bucket_bytes: the most that goes over at once; the tensors of one parameter are never parted, so a larger
            one has a larger bucket to itself.
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
        self._plans = plan_buckets(walk.pieces, bucket_bytes)
        self._names = [entry.name for entry in walk.entries]
        self._largest = max(plan.num_bytes for plan in self._plans)
        self._buffer = None if sink is None else sink.allocate(self._largest, walk.device)
        self._takes_part = False

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
            for index, plan in enumerate(self._plans):
                # The buffer is filled again only after every rank has heard that this bucket was read.
                self._send(plan, index, lambda sink, bucket: sink.put(bucket), f"{what}: bucket {index + 1}")
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

    def _compare(self, names: Sequence[str], what: str) -> None:
        """Send these tensors once more, for comparison only. Collective over the world."""
        plans = plan_buckets(self._walk.pieces, self._largest, names=set(names))
        for index, plan in enumerate(plans):
            self._send(plan, index, _compare_bucket, f"{what}, part {index + 1} of {len(plans)}")

    def _send(self, plan: BucketPlan, index: int, action: Callable[[WeightSink, Bucket], None], what: str) -> None:
        """Fill the buffer and do this with it. Collective over the world."""
        self._fill(plan)
        buffer = None if self._buffer is None else self._buffer[: plan.num_bytes]
        self._agree(lambda sink: action(sink, Bucket(index, plan.entries, buffer)), what)

    def _fill(self, plan: BucketPlan) -> None:
        """Copy the plan's tensors into the buffer, if there is one. Collective over tensor and pipeline groups."""
        wanted: dict[str, torch.Tensor] = {}
        if self._buffer is not None and self._takes_part:
            wanted = {entry.name: entry.view(self._buffer) for entry in plan.entries}
        for piece in plan.pieces:
            targets = [wanted.get(entry.name) for entry in self._walk.pieces[piece]]
            self._walk.copy_piece(piece, targets if wanted else None)

    def _agree(self, action: Callable[[WeightSink], Any], what: str) -> None:
        """Do this with the sink, if this rank has one that takes part, and hear from all. Collective over the world."""
        error = None
        if self._sink is not None and self._takes_part:
            try:
                action(self._sink)
            except Exception as problem:  # noqa: BLE001 whatever it is, the other ranks wait to hear of it
                error = f"{type(problem).__name__}: {problem}"
        agree(error, self._groups.world, what)

    def _abort(self) -> None:
        """The publish has failed already, with an error that says why: one of the abort's own adds nothing."""
        if self._sink is not None and self._takes_part:
            with contextlib.suppress(Exception):
                self._sink.abort()


def plan_buckets(
    pieces: Sequence[Sequence[WalkEntry]], bucket_bytes: int, *, names: Collection[str] | None = None
) -> tuple[BucketPlan, ...]:
    """Cut the walk, or only these names of it, into runs of whole pieces of at most `bucket_bytes`.

    A larger piece has a bucket to itself.
    """
    assert pieces and bucket_bytes > 0
    plans: list[BucketPlan] = []
    numbers: list[int] = []
    entries: list[BucketEntry] = []
    for number, piece in enumerate(pieces):
        kept = [entry for entry in piece if names is None or entry.name in names]
        if not kept:
            continue
        placed = _place(kept, entries[-1].end_bytes if entries else 0)
        if entries and placed[-1].end_bytes > bucket_bytes:
            plans.append(BucketPlan(tuple(numbers), tuple(entries)))
            numbers, entries = [], []
            placed = _place(kept, 0)
        numbers.append(number)
        entries += placed
    return (*plans, BucketPlan(tuple(numbers), tuple(entries)))


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
