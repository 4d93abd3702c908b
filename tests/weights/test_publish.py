"""Publishing on one rank: buckets by hand, failures of the sink, comparison afterwards."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.families.describe import describe
from grpo_megatron.parallel.errors import RankFailure
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.gather import WalkEntry, WeightWalk
from grpo_megatron.weights.publish import Publisher, plan_buckets, sample_names
from grpo_megatron.weights.sink import Bucket
from tests.building import build_tiny_policy

pytestmark = pytest.mark.unit


class RecordingSink:
    """Keeps what it is given, in this process; fails where it is told to."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        self.buckets: list[Bucket] = []
        self.compared: list[str] = []
        self.fail_in = ""
        self.spoil = ""
        self._version, self._next = -1, -1

    def _step(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fail_in:
            raise OSError(f"no more room in {name}")

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def begin(self, version: int) -> None:
        self._version, self._next = -1, version
        self.buckets.clear()
        self.compared.clear()
        self._step("begin")

    def put(self, bucket: Bucket) -> None:
        """Only remembers it: a slow receiver reads when `settle` is called, at the last moment (case W1)."""
        self._step(f"put {bucket.index}")
        self.buckets.append(bucket)

    def settle(self) -> None:
        self._step("settle")
        bucket = self.buckets[-1]
        for entry in bucket.entries:
            self.tensors[entry.name] = entry.view(bucket.buffer).clone()
        bucket.buffer.fill_(255)  # was read: nothing of it is needed any more
        if self.spoil in self.tensors:
            self.tensors[self.spoil].view(-1)[0] += 1

    def commit(self) -> None:
        self._step("commit")
        self._version = self._next

    def abort(self) -> None:
        self._step("abort")
        self._version = -1

    def version(self) -> int:
        return self._version

    def compare(self, bucket: Bucket) -> dict[str, int]:
        self._step(f"compare {bucket.index}")
        self.compared += [entry.name for entry in bucket.entries]
        return {entry.name: checksum(self.tensors[entry.name]) for entry in bucket.entries}


def _piece(**counts: int) -> tuple[WalkEntry, ...]:
    return tuple(WalkEntry(name, (count,), torch.bfloat16) for name, count in counts.items())


def test_buckets_by_hand() -> None:
    """64-byte steps; halves of 256 bytes. Exactly full (case W2), whole pieces only, larger than a half, and a rest."""
    pieces = [_piece(a=128), _piece(b=3), _piece(c=10, d=64), _piece(e=8, f=8), _piece(g=300), _piece(h=1)]
    plans = plan_buckets(pieces, 512)
    assert [[(entry.name, entry.offset_bytes) for entry in plan.entries] for plan in plans] == [
        [("a", 0)],
        [("b", 0), ("c", 64), ("d", 128)],
        [("e", 0), ("f", 64)],
        [("g", 0)],
        [("h", 0)],
    ]
    assert [plan.num_bytes for plan in plans] == [256, 256, 80, 600, 2]
    assert [plan.pieces for plan in plans] == [(0,), (1, 2), (3,), (4,), (5,)]
    assert [plan.start_bytes for plan in plans] == [0, 256, 0, 0, 0]
    assert [one.overlaps(other) for one, other in itertools.pairwise(plans)] == [False, False, True, True]
    assert [plan.pieces for plan in plan_buckets(pieces, 511)] == [(0,), (1,), (2,), (3,), (4,), (5,)]


def test_a_part_of_the_walk_is_planned_like_all_of_it() -> None:
    pieces = [_piece(a=128), _piece(b=3), _piece(c=10, d=64), _piece(e=8)]
    plans = plan_buckets(pieces, 512, names={"b", "d", "e"})
    assert [[(entry.name, entry.offset_bytes) for entry in plan.entries] for plan in plans] == [
        [("b", 0), ("d", 64), ("e", 192)]
    ]
    assert plans[0].pieces == (1, 2, 3)


def test_the_sample_depends_on_the_version_only() -> None:
    names = [f"tensor-{i}" for i in range(100)]
    assert sample_names(names, 7) == sample_names(list(names), 7)
    assert sample_names(names, 7) != sample_names(names, 8)
    assert sample_names(["only"], 1) == ["only"]


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


@pytest.fixture
def publisher(tiny_llama: Path, single_rank_groups: Groups, sink: RecordingSink) -> Publisher:
    chunks = build_tiny_policy(tiny_llama, single_rank_groups)
    walk = WeightWalk(chunks, describe(tiny_llama), single_rank_groups)
    # One embedding of 151 x 64 floats fills half of the buffer to the last byte.
    return Publisher(walk, sink, single_rank_groups, bucket_bytes=2 * 151 * 64 * 4)


def test_every_tensor_arrives_as_it_is_in_the_checkpoint(
    tiny_llama: Path, publisher: Publisher, sink: RecordingSink
) -> None:
    report = publisher.publish(3, compare="all")
    stored = load_file(tiny_llama / "model.safetensors")
    assert sink.tensors.keys() == stored.keys()
    assert all(torch.equal(sink.tensors[name], stored[name]) for name in stored)
    assert (report.version, report.num_compared) == (3, len(stored))
    assert report.num_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert report.num_buckets == len(sink.buckets) > 3
    assert sink.buckets[0].buffer.nbytes == 151 * 64 * 4  # full to the last byte, case W2
    assert publisher.num_buffer_bytes == report.peak_extra_bytes == 2 * 151 * 64 * 4
    memory = sink.buckets[0].buffer.data_ptr()
    assert all(bucket.buffer.data_ptr() == memory + bucket.start_bytes for bucket in sink.buckets)
    assert {bucket.start_bytes for bucket in sink.buckets} == {0, 151 * 64 * 4}
    # While one bucket is read the next is filled, and none is put before the last was settled.
    steps = [call.split()[0] for call in sink.calls if call.split()[0] in ("put", "settle")]
    assert steps == ["put", "settle"] * report.num_buckets


@pytest.mark.parametrize("fail_in", ["begin", "put 0", "put 2", "settle", "compare 0", "commit"])
def test_a_sink_that_fails_is_aborted_and_the_next_publish_works(
    publisher: Publisher, sink: RecordingSink, fail_in: str
) -> None:
    """Case W4."""
    publisher.publish(1)
    sink.fail_in = fail_in
    with pytest.raises(RankFailure, match=f"publish of version 2.*\n.*no more room in {fail_in}"):
        publisher.publish(2)
    assert sink.calls[-2:] == [fail_in, "abort"]
    assert sink.version() == -1
    sink.fail_in = ""
    publisher.publish(3, compare="all")
    assert sink.version() == 3


def test_some_tensors_are_compared_before_the_version_is_served(publisher: Publisher, sink: RecordingSink) -> None:
    report = publisher.publish(3)
    assert sorted(sink.compared) == sorted(sample_names(list(sink.tensors), 3))
    assert report.num_compared == len(sink.compared) == 8
    assert sink.calls.index("commit") > max(i for i, call in enumerate(sink.calls) if call.startswith("compare"))


def test_an_engine_that_is_left_out_hears_nothing_and_keeps_its_version(
    publisher: Publisher, sink: RecordingSink
) -> None:
    publisher.publish(1)
    sink.calls.clear()
    publisher.publish(2, here=False)
    assert sink.calls == [] and sink.version() == 1
    publisher.publish(2, here=True)
    assert sink.version() == 2


def test_an_error_while_aborting_does_not_hide_the_first_one(publisher: Publisher, sink: RecordingSink) -> None:
    sink.fail_in = "commit"
    sink.abort = lambda: 1 / 0  # type: ignore[assignment, return-value]
    with pytest.raises(RankFailure, match="no more room in commit"):
        publisher.publish(1)


def test_a_tensor_that_arrives_changed_is_named_and_the_version_is_not_served(
    publisher: Publisher, sink: RecordingSink
) -> None:
    sink.spoil = "model.norm.weight"
    with pytest.raises(RankFailure, match="checksums differ for 1 of .*: model.norm.weight"):
        publisher.publish(1, compare="all")
    assert sink.version() == -1


def test_the_full_comparison_finds_what_the_sample_missed(publisher: Publisher, sink: RecordingSink) -> None:
    publisher.publish(1)
    assert publisher.compare_all(1) == len(sink.tensors)
    sink.tensors["model.norm.weight"][5] += 1
    with pytest.raises(RankFailure, match=r"model\.norm\.weight"):
        publisher.compare_all(1)
    with pytest.raises(RankFailure, match="serves version 1, not 2"):
        publisher.compare_all(2)
