"""SGLang on the trainer's own CUDA device. README.md: what has been seen running."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from grpo_megatron.families.describe import describe
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.platform.device import current_platform
from grpo_megatron.rollout.sglang import sink as sink_module
from grpo_megatron.rollout.sglang.engine import SglangEngine
from grpo_megatron.rollout.sglang.sink import SglangSink
from grpo_megatron.weights.gather import WeightWalk
from grpo_megatron.weights.publish import Publisher
from tests.building import build_tiny_policy
from tests.rollout.conformance import ProcessEngineConformance, Subject
from tests.rollout.oracle import largest_difference
from tests.rollout.requests import make_request, random_prompts, run
from tests.rollout.sglang_server import NEEDS_SGLANG, start_sglang
from tests.tiny import make_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    NEEDS_SGLANG,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BOUND = 1e-3
"""Float32 on the device multiplies matrices in another order than the CPU."""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"))
    # On a GPU SGLang follows a request's seed only in this mode.
    settings = {"enable_deterministic_inference": True, "attention_backend": "triton"}
    engine = start_sglang(folder, tmp_path_factory.mktemp("logs"), engine_stall_seconds=30.0, sglang=settings)
    engine.set_version(0)
    yield Subject(engine, folder, max_concurrent_rollouts=32, max_sequence_tokens=128)
    engine.close()


class TestSglangOnCuda(ProcessEngineConformance):
    def kill(self, subject: Subject) -> None:
        os.kill(subject.engine.life.process.process_id, signal.SIGKILL)

    def test_sleeping_and_waking_changes_no_answer(self, subject: Subject) -> None:
        """The cache alone: weights that slept come back with a publish, see below."""
        requests = [make_request(p, 2, seed=9, max_new_tokens=10) for p in random_prompts((5, 33), seed=4)]
        before = {(one.prompt_id, one.index): one.token_ids for one in run(subject.engine, requests)}
        subject.engine.sleep(["kv_cache"])
        subject.engine.wake(["kv_cache"])
        assert before == {(one.prompt_id, one.index): one.token_ids for one in run(subject.engine, requests)}


@contextmanager
def _publishing(folder: Path, groups: Groups) -> Iterator[tuple[SglangEngine, SglangSink, Publisher, Path]]:
    """An engine that was started from other weights than the trainer has."""
    source = make_tiny_llama(folder / "trainer", seed=1)
    engine = start_sglang(make_tiny_llama(folder / "engine", seed=2), folder, engine_stall_seconds=60.0)
    life = engine.life
    assert life is not None
    sink = SglangSink(lambda: life.control, tensor_parallel=1, asleep=lambda: life.asleep)
    walk = WeightWalk(build_tiny_policy(source, groups), describe(source), groups)
    try:
        yield engine, sink, Publisher(walk, sink, groups, bucket_bytes=1 << 16), source
    finally:
        sink.close()
        engine.close()


def _difference(engine: SglangEngine, source: Path) -> float:
    prompts = {prompt.id: prompt for prompt in random_prompts((1, 9, 40), seed=3)}
    rollouts = run(engine, [make_request(p, 2, max_new_tokens=16) for p in prompts.values()])
    return largest_difference(source, prompts, rollouts, 1.0)


def test_weights_go_over_by_device_handles_and_come_back_after_sleep(
    tmp_path: Path, single_rank_groups: Groups
) -> None:
    platform = current_platform()
    with _publishing(tmp_path, single_rank_groups) as (engine, sink, publisher, source):
        assert (sink.transport, sink.reason) == ("device memory", "")
        publisher.publish(1)
        engine.set_version(1)
        assert _difference(engine, source) < BOUND
        awake = platform.memory_used_bytes()
        engine.sleep(["kv_cache", "weights"])
        end = time.monotonic() + 20
        while platform.memory_used_bytes() >= awake - engine.cache_bytes // 2 and time.monotonic() < end:
            time.sleep(0.1)
        assert platform.memory_used_bytes() < awake - engine.cache_bytes // 2
        assert engine.needs_weights
        engine.wake(["weights"])
        sink.forget()
        publisher.publish(2)
        engine.wake(["kv_cache"])
        engine.set_version(2)
        assert _difference(engine, source) < BOUND
        assert publisher.compare_all(2) > 0


def test_where_handles_do_not_work_weights_go_through_pinned_memory_and_it_says_so(
    tmp_path: Path, single_rank_groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(buffer: torch.Tensor) -> None:
        raise RuntimeError("no handles here")

    monkeypatch.setattr(sink_module, "export_handle", refuse)
    with _publishing(tmp_path, single_rank_groups) as (engine, sink, publisher, source):
        assert sink.transport == "pinned shared memory" and "no handles here" in sink.reason
        publisher.publish(1)
        engine.set_version(1)
        assert _difference(engine, source) < BOUND
