"""Publishing to a real SGLang server, on one rank: values, versions, and everything that has to be noticed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from grpo_megatron.batch import Rollout
from grpo_megatron.families.describe import describe
from grpo_megatron.parallel.errors import RankFailure
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.rollout.sglang.engine import SglangEngine
from grpo_megatron.rollout.sglang.sink import SglangSink
from grpo_megatron.weights.export import export_hf
from grpo_megatron.weights.gather import WeightWalk
from grpo_megatron.weights.publish import Publisher
from grpo_megatron.weights.sink import Bucket
from tests.building import build_tiny_policy
from tests.rollout.oracle import largest_difference, logprobs
from tests.rollout.requests import make_prompt, make_request, random_prompts, run
from tests.rollout.sglang_server import NEEDS_SGLANG, start_sglang
from tests.tiny import make_tiny_llama

pytestmark = [pytest.mark.engines, NEEDS_SGLANG]
BUCKET_BYTES = 151 * 64 * 4  # the embedding fills one to the last byte, case W2


@dataclass
class Setting:
    """A trainer of one rank and a server that was started from other weights of the same shape."""

    engine: SglangEngine
    chunks: list[torch.nn.Module]
    source: Path
    folder: Path
    groups: Groups
    sink: SglangSink
    publisher: Publisher
    version: int = 0

    def change(self) -> None:
        """What an update does: every parameter gets other values."""
        with torch.no_grad():
            for parameter in self.chunks[0].parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.03)

    def publish(self, **options) -> None:  # noqa: ANN003
        self.version += 1
        self.publisher.publish(self.version, **options)
        assert self.engine.life is not None
        self.engine.life.version = self.version

    def difference(self) -> float:
        """Between the engine's log-probs and HF's of the trainer's weights as exported now."""
        exported = self.folder / f"exported-{self.version}"
        if not exported.exists():
            export_hf(self.chunks, describe(self.source), exported, source_folder=self.source, groups=self.groups)
        prompts = random_prompts((1, 9, 40), seed=self.version)
        rollouts = run(self.engine, [make_request(p, 2, max_new_tokens=16) for p in prompts])
        assert {span.version for rollout in rollouts for span in rollout.versions} == {self.version}
        return largest_difference(exported, {p.id: p for p in prompts}, rollouts, 1.0)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, single_rank_groups: Groups) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("publish")
    source = make_tiny_llama(folder / "trainer", tie_embeddings=False, seed=1)
    other = make_tiny_llama(folder / "engine", tie_embeddings=False, seed=2)
    engine = start_sglang(other, folder, engine_stall_seconds=60.0)
    assert engine.life is not None
    life = engine.life
    sink = SglangSink(lambda: life.control, tensor_parallel=1, asleep=lambda: life.asleep)
    chunks = build_tiny_policy(source, single_rank_groups)
    walk = WeightWalk(chunks, describe(source), single_rank_groups)
    publisher = Publisher(walk, sink, single_rank_groups, bucket_bytes=BUCKET_BYTES)
    try:
        yield Setting(engine, chunks, source, folder, single_rank_groups, sink, publisher)
    finally:
        sink.close()
        engine.close()


def test_a_parameter_that_the_publish_does_not_reach_is_found_at_the_first_one(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has good values of its own for it, from the checkpoint that it was started with."""
    put = setting.sink.put

    def without_the_head(bucket: Bucket) -> None:
        kept = tuple(entry for entry in bucket.entries if entry.name != "lm_head.weight")
        put(Bucket(bucket.index, kept, bucket.buffer))

    monkeypatch.setattr(setting.sink, "put", without_the_head)
    monkeypatch.setattr(setting.sink, "compare", lambda bucket: None)
    with pytest.raises(RankFailure, match="NaN in lm_head.weight of the policy on rank 0: the publish does not reach"):
        setting.publish()
    assert setting.sink.version() == -1


def test_the_engine_s_logprobs_are_those_of_the_exported_weights(setting: Setting) -> None:
    setting.publish(compare="all")
    assert setting.difference() < 1e-4
    for _ in range(2):
        setting.change()
        setting.publish()
        assert setting.sink.version() == setting.version
        assert setting.difference() < 1e-4
    names = len(WeightWalk(setting.chunks, describe(setting.source), setting.groups).entries)
    assert setting.publisher.compare_all(setting.version) == names
    assert setting.difference() < 1e-4


def _flip_a_byte(setting: Setting, action: Callable[[Bucket], object]) -> Callable[[Bucket], object]:
    def spoiled(bucket: Bucket) -> object:
        assert bucket.buffer is not None
        bucket.buffer[bucket.entries[0].offset_bytes + 2] ^= 0x10
        return action(bucket)

    return spoiled


@pytest.mark.parametrize("broken", ["put", "compare"])
def test_bytes_that_change_in_the_shared_buffer_are_found_and_the_next_publish_works(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Case W4, with the bytes really wrong where the engine reads them."""
    setting.change()
    with monkeypatch.context() as patch:
        patch.setattr(setting.sink, broken, _flip_a_byte(setting, getattr(setting.sink, broken)))
        with pytest.raises(RankFailure, match="the engine used other values than were published for"):
            setting.publish(compare="all")
    assert setting.sink.version() == -1
    assert setting.engine.life is not None and setting.engine.life.read_version() == -1
    setting.publish()
    assert setting.difference() < 1e-4


def test_an_exception_inside_the_scheduler_is_reported_and_the_server_lives_on(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = setting.sink.put

    def misshapen(bucket: Bucket) -> None:
        first, *others = bucket.entries
        half = type(first)(first.name, first.dtype, (first.shape[0] // 2, *first.shape[1:]), first.offset_bytes)
        put(Bucket(bucket.index, (half, *others), bucket.buffer))

    assert setting.engine.life is not None
    process_id = setting.engine.life.process.process_id
    with monkeypatch.context() as patch:
        patch.setattr(setting.sink, "put", misshapen)
        with pytest.raises(RankFailure, match="could not load weights: the policy on rank 0: AssertionError"):
            setting.publish()
    setting.publish()
    assert setting.difference() < 1e-4
    assert setting.engine.life.process.process_id == process_id


def test_answers_that_are_paused_go_on_with_the_weights_of_a_publish_in_between(setting: Setting) -> None:
    """Each token's log-prob is that of the version that it is stamped with, over the tokens of both."""
    setting.change()
    setting.publish()
    setting.difference()  # exports this version
    old = setting.version
    quick = make_request(make_prompt("quick", (5, 6)), max_new_tokens=4)
    long = make_request(make_prompt("long", (7, 8, 9)), 2, max_new_tokens=90)

    def change_the_weights(rollout: Rollout) -> None:
        if rollout.prompt_id == "quick":
            setting.engine.pause()
            setting.change()
            setting.publish()
            setting.engine.resume()

    rollouts = [one for one in run(setting.engine, [quick, long], on_rollout=change_the_weights) if one.num_tokens > 4]
    setting.difference()
    assert [[span.version for span in one.versions] for one in rollouts] == [[old, old + 1]] * 2
    for rollout in rollouts:
        assert rollout.num_tokens == 90
        for span in rollout.versions:
            expected = logprobs(setting.folder / f"exported-{span.version}", long.prompt, rollout, 1.0)
            found = zip(rollout.logprobs[span.start : span.end], expected[span.start : span.end], strict=True)
            assert max(abs(one - other) for one, other in found) < 1e-4


def test_memory_stays_flat_over_publishes(setting: Setting) -> None:
    """Cases M3 and W13: the version advances each time, and nothing stays of what the last twelve publishes brought."""
    assert setting.engine.life is not None
    server = psutil.Process(setting.engine.life.process.process_id)
    processes = [psutil.Process(), server, *server.children(recursive=True)]

    def used() -> tuple[int, int]:
        memory = sum(process.memory_full_info().uss for process in processes)
        return memory, sum(process.num_fds() for process in processes)

    for _ in range(3):
        setting.publish()
    before, descriptors = used()
    for _ in range(12):
        setting.publish()
    after, descriptors_after = used()
    num_bytes = sum(parameter.nbytes for parameter in setting.chunks[0].parameters())
    assert after - before < 12 * num_bytes / 4
    assert descriptors_after < descriptors + 6  # connections of the last request may still be closing
    assert setting.sink.version() == setting.version
