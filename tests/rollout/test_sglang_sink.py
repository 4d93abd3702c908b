"""Publishing to SGLang without SGLang: what the receiver in its schedulers finds, and what the sink makes of it."""

import json
import time
from collections.abc import Iterator

import pytest
import torch

from grpo_megatron.rollout.sglang.control import EngineFailure
from grpo_megatron.rollout.sglang.receiver import Receiver
from grpo_megatron.rollout.sglang.sink import SglangSink
from grpo_megatron.weights.checksum import checksum
from grpo_megatron.weights.sink import Bucket, BucketEntry
from tests.rollout.sglang_pretended import HIDDEN, VOCABULARY, FusedModel, GreedyListModel, PretendedServer

pytestmark = pytest.mark.unit
CPU = torch.device("cpu")
SHAPES = {"embed": (VOCABULARY, HIDDEN), "q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN)}


class Case:
    """A server that is pretended, and the publishing side by hand."""

    def __init__(self, ranks: list[list[torch.nn.Module]], **options: object) -> None:
        self.server = PretendedServer(ranks)
        self.sink = SglangSink(lambda: self.server, tensor_parallel=len(ranks), **options)  # type: ignore[arg-type]
        self.buffer = self.sink.allocate(4096, CPU)
        self.values: dict[str, torch.Tensor] = {}
        self.change(0)

    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        self.values["norm"] = torch.randn(HIDDEN, generator=generator)

    def bucket(self, *names: str) -> Bucket:
        entries, start = [], 0
        for name in names:
            entries.append(BucketEntry(name, torch.float32, tuple(self.values[name].shape), start))
            start = entries[-1].end_bytes
            entries[-1].view(self.buffer).copy_(self.values[name])
        return Bucket(0, tuple(entries), self.buffer[:start])

    def send(self, version: int, *names: str) -> None:
        self.sink.begin(version)
        for name in names or self.values:
            self.put(name)

    def put(self, name: str) -> None:
        self.sink.put(self.bucket(name))
        self.sink.settle()
        self.buffer.fill_(255)  # case W1: nothing of it is needed any more

    def publish(self, version: int) -> None:
        self.send(version)
        self.sink.compare(self.bucket(*self.values))
        self.sink.commit()


@pytest.fixture
def single() -> Iterator[Case]:
    case = Case([[FusedModel()]])
    yield case
    case.sink.close()


@pytest.fixture
def parallel() -> Iterator[Case]:
    case = Case([[FusedModel(rank=rank, size=2)] for rank in range(2)])
    yield case
    case.sink.close()


def test_every_tensor_is_where_the_model_puts_it_and_the_version_can_be_read(single: Case) -> None:
    single.publish(7)
    (model,) = single.server.ranks[0]
    assert torch.equal(model.embed, single.values["embed"])
    assert torch.equal(model.qkv_proj, torch.cat([single.values[name] for name in "qkv"]))
    assert torch.equal(model.norm, single.values["norm"].bfloat16())
    assert single.server.weight_version == "7" and single.sink.version() == 7
    assert single.server.calls[-3:] == ["/end_weight_update", "/flush_cache", "/update_weight_version"]


def test_both_ranks_of_an_engine_get_their_parts(parallel: Case) -> None:
    """Eleven rows over two ranks: the last row of the second is padding, which no value is published for."""
    parallel.publish(1)
    first, second = (models[0] for models in parallel.server.ranks)
    assert torch.equal(torch.cat([first.embed, second.embed])[:VOCABULARY], parallel.values["embed"])
    assert torch.equal(second.qkv_proj, torch.cat([parallel.values[name][HIDDEN // 2 :] for name in "qkv"]))


def test_the_comparison_gives_checksums_of_what_arrived(single: Case) -> None:
    single.send(1)
    bucket = single.bucket("q", "norm")
    assert single.sink.compare(bucket) == {name: checksum(single.values[name]) for name in ("q", "norm")}


def test_bytes_that_change_on_the_way_are_noticed(single: Case) -> None:
    single.send(1)
    bucket = single.bucket("q")
    ours = checksum(single.values["q"])
    bucket.buffer[5] ^= 1
    with pytest.raises(EngineFailure, match="used other values than were published for q"):
        single.sink.compare(bucket)
    assert single.sink.compare(bucket) != {"q": ours}


@pytest.mark.parametrize("name", ["embed", "k", "norm"])
def test_a_tensor_that_stayed_old_is_found_by_name(single: Case, name: str) -> None:
    single.publish(1)
    single.change(1)
    single.server.ranks[0][0].skip = name
    single.send(2)
    single.server.ranks[0][0].skip = ""
    with pytest.raises(EngineFailure, match=f"other values than were published for {name}$"):
        single.sink.compare(single.bucket(*single.values))


def test_one_wrong_bit_in_the_engine_is_found_also_where_it_is_nan(single: Case) -> None:
    single.values["v"][2, 3] = torch.nan
    single.send(1)
    assert single.sink.compare(single.bucket("v"))
    single.server.ranks[0][0].qkv_proj.view(torch.int32)[2 * HIDDEN + 2, 3] += 1  # another NaN
    with pytest.raises(EngineFailure, match="for v$"):
        single.sink.compare(single.bucket("v"))


def test_a_stale_rank_is_found(parallel: Case) -> None:
    parallel.publish(1)
    parallel.server.ranks[1][0].qkv_proj[0, 0] += 1
    with pytest.raises(EngineFailure, match="for q$"):
        parallel.sink.compare(parallel.bucket("q", "k"))


def test_the_comparison_works_outside_of_a_publish_and_leaves_the_version(single: Case) -> None:
    single.publish(3)
    assert single.sink.compare(single.bucket("q"))
    assert not single.server.in_session and single.sink.version() == 3


def test_a_model_that_takes_the_whole_list_first_is_compared_as_well() -> None:
    case = Case([[GreedyListModel()]])
    case.publish(1)
    case.server.ranks[0][0].qkv_proj[0, 0] += 1
    with pytest.raises(EngineFailure, match="other values"):
        case.sink.compare(case.bucket("v", "q"))
    case.sink.close()


def test_a_tensor_that_no_model_takes_is_refused_unless_it_is_known_to_be_unused() -> None:
    for unused in ((), ("mtp",)):
        case = Case([[FusedModel()]], unused=unused)
        case.values["mtp"] = torch.ones(3)
        case.send(1)
        if unused:
            case.sink.compare(case.bucket("mtp"))
        else:
            with pytest.raises(EngineFailure, match="has no place for mtp"):
                case.sink.compare(case.bucket("mtp"))
        case.sink.close()


def test_a_parameter_that_no_publish_reaches_is_found_at_the_first(single: Case) -> None:
    """Everything is NaN at first; a checkpoint that was loaded at the start would hide it."""
    single.send(1, "embed", "q", "v", "norm")
    with pytest.raises(EngineFailure, match="NaN in qkv_proj of the policy on rank 0: the publish does not reach them"):
        single.sink.commit()
    single.sink.abort()
    assert single.sink.version() == -1 and single.server.weight_version == "-1"
    single.publish(2)
    assert single.sink.version() == 2
    assert bool(single.server.ranks[0][0].cache_scale == 1)  # a scale, of which checkpoints know nothing


def test_a_drafter_is_reached_as_well_and_must_be() -> None:
    case = Case([[FusedModel(), FusedModel(has_extra=True)]], has_drafter=True)
    case.send(1)
    with pytest.raises(EngineFailure, match="NaN in drafter_head of drafter 1 on rank 0"):
        case.sink.commit()
    case.sink.close()
    for models, has_drafter, there in (
        ([FusedModel()], True, "no drafter"),
        ([FusedModel(), FusedModel()], False, "1 drafters"),
    ):
        case = Case([models], has_drafter=has_drafter)
        with pytest.raises(EngineFailure, match=f"the engine has {there}, which is not what it was built with"):
            case.sink.begin(1)
        case.sink.close()


def test_only_the_first_publish_after_a_start_is_poisoned(single: Case) -> None:
    single.publish(1)
    single.send(2, "q")
    assert not single.server.ranks[0][0].embed.isnan().any()
    single.sink.abort()
    again = PretendedServer([[FusedModel()]])
    single.server = again  # a restarted engine has its checkpoint's weights, and other calls to talk to it
    assert single.sink.version() == -1
    single.sink.begin(3)
    assert again.ranks[0][0].embed.isnan().all()
    single.sink.abort()
    single.publish(4)
    single.sink.forget()
    assert single.sink.version() == -1
    single.sink.begin(5)
    assert again.ranks[0][0].embed.isnan().all()


def test_an_exception_while_loading_is_a_report_and_the_next_publish_works(single: Case) -> None:
    single.publish(1)
    single.values["bad"] = torch.ones(3)
    with pytest.raises(EngineFailure, match=r"could not load weights: the policy on rank 0: RuntimeError: start \(0\)"):
        single.send(2)
    single.sink.abort()
    assert not single.server.in_session and single.sink.version() == -1
    del single.values["bad"]
    single.publish(3)
    assert single.sink.version() == 3


@pytest.mark.parametrize("path", ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"])
def test_a_call_that_the_server_refuses_fails_the_publish_and_not_the_next(single: Case, path: str) -> None:
    single.publish(1)
    single.server.refuse = path
    with pytest.raises(EngineFailure, match="is refused"):
        single.publish(2)
    single.sink.abort()
    single.server.refuse = ""
    single.publish(3)
    assert single.sink.version() == 3


def test_a_scheduler_that_dies_is_noticed_at_once(single: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    single.publish(1)
    single.sink.begin(2)
    monkeypatch.setattr(Receiver, "_answer", lambda *_: 1 / 0)  # ends its loop, as the death of the process would
    with pytest.raises(EngineFailure, match="load on the engine's rank 0: its scheduler is gone"):
        single.put("q")
    single.sink.abort()
    monkeypatch.undo()
    single.publish(3)


def test_a_scheduler_that_does_not_call_back_is_noticed_at_once(single: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receiver, "_serve", lambda *_: None)
    with pytest.raises(EngineFailure, match="the engine's schedulers did not call back: see its log"):
        single.sink.begin(1)
    single.sink.abort()
    monkeypatch.undo()
    single.publish(2)


def test_a_scheduler_that_hangs_runs_into_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case W1 as well: a receiver that is slow is waited for, up to the deadline."""
    case = Case([[FusedModel()]], deadline_seconds=0.4)
    answer = Receiver._answer
    for seconds in (0.15, 1.0):
        case.sink.begin(1)
        monkeypatch.setattr(Receiver, "_answer", lambda *a, s=seconds: (time.sleep(s), answer(*a))[1])
        if seconds < 0.4:
            for name in case.values:
                case.put(name)
            assert torch.equal(case.server.ranks[0][0].embed, case.values["embed"])
        else:
            with pytest.raises(EngineFailure, match=r"load on the engine's rank 0: no answer within 0\.4 s"):
                case.put("q")
        case.sink.abort()
        monkeypatch.undo()
    case.publish(2)
    case.sink.close()


def test_a_session_that_somebody_left_open_is_ended_first(single: Case) -> None:
    single.server.in_session = True
    single.publish(1)
    assert single.sink.version() == 1


def test_messages_that_make_no_sense_never_end_the_scheduler() -> None:
    receiver, model = Receiver(), FusedModel()
    receiver.load(model, [("no json", torch.empty(0))])
    lost = {"action": "serve", "address": "nobody", "token": "", "rank": 0, "deadline_seconds": 1.0}
    receiver.load(model, [(json.dumps(lost), torch.empty(0))])
    answer = receiver._answer({"action": "load", "memory": {"path": "/proc/self/fd/99999", "num_bytes": 4}})
    assert "FileNotFoundError" in answer["error"]
    assert "KeyError: 'dance'" in receiver._answer({"action": "dance", "memory": None})["error"]


def test_an_entry_outside_of_the_memory_is_refused(single: Case) -> None:
    single.sink.begin(1)
    entry = BucketEntry("q", torch.float32, (HIDDEN, HIDDEN), 4096)
    with pytest.raises(EngineFailure, match="q ends at byte 4352 of 4096"):
        single.sink.put(Bucket(0, (entry,), single.buffer))
        single.sink.settle()


def test_sleeping_weights_are_refused_before_anything_is_sent(single: Case) -> None:
    """Case W11."""
    single.sink._asleep = lambda: ("weights",)
    with pytest.raises(EngineFailure, match="wake them before the publish"):
        single.sink.begin(1)
    assert single.server.calls == []


def test_buckets_lie_where_they_say_they_do(single: Case) -> None:
    """The second half of the memory, while the first is written."""
    single.sink.begin(1)
    single.buffer[2048 : 2048 + 32].view(torch.float32).copy_(single.values["norm"])
    entry = BucketEntry("norm", torch.float32, (HIDDEN,), 0)
    single.sink.put(Bucket(0, (entry,), single.buffer[2048:2080], start_bytes=2048))
    single.buffer[:2048].fill_(255)
    single.sink.settle()
    assert torch.equal(single.server.ranks[0][0].norm, single.values["norm"].bfloat16())
