"""The embedded engine against the conformance suite, and what only it promises."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_megatron.batch import Rollout
from grpo_megatron.config.schema import RolloutSection
from grpo_megatron.families.describe import describe
from grpo_megatron.platform.device import current_platform
from grpo_megatron.rollout.megatron.build import build_megatron_engine
from grpo_megatron.rollout.megatron.cache import KeyValueCache
from grpo_megatron.rollout.megatron.engine import MegatronEngine
from tests.building import build_tiny_policy
from tests.rollout.conformance import EngineConformance, Subject
from tests.rollout.oracle import greedy_ids, largest_difference
from tests.rollout.requests import ListSource, by_answer, make_prompt, make_request, random_prompts, run

pytestmark = pytest.mark.engines
MAX_SEQUENCE = 128


@pytest.fixture(scope="module")
def chunks(single_rank_groups, tiny_llama: Path):  # noqa: ANN001, ANN201
    return build_tiny_policy(tiny_llama, single_rank_groups)


@pytest.fixture(scope="module")
def build(chunks, single_rank_groups, tiny_llama: Path):  # noqa: ANN001, ANN201
    def make(*, cache_tokens: int | None = None, **section) -> MegatronEngine:  # noqa: ANN003
        settings = RolloutSection(engine="megatron", **({"max_concurrent_rollouts": 6} | section))
        return build_megatron_engine(
            chunks,
            describe(tiny_llama),
            settings,
            single_rank_groups,
            current_platform(),
            lambda token_ids: " ".join(map(str, token_ids)),
            MAX_SEQUENCE,
            cache_tokens=cache_tokens,
        )

    return make


@pytest.fixture(scope="module")
def subject(build, tiny_llama: Path) -> Iterator[Subject]:  # noqa: ANN001
    engine = build(max_concurrent_rollouts=24)
    yield Subject(engine, tiny_llama, max_concurrent_rollouts=24, max_sequence_tokens=MAX_SEQUENCE)
    engine.close()


class TestMegatronEngine(EngineConformance):
    """Every test of the suite."""


def test_a_prompt_is_computed_once_for_its_group(build) -> None:  # noqa: ANN001
    request = make_request(make_prompt("shared", range(3, 43)), 6, max_new_tokens=3)
    for share, expected in ((True, 40), (False, 240)):
        engine = build(share_prompt_prefix=share)
        run(engine, [request])
        assert engine.stats().num_prompt_tokens == expected


def test_answers_are_the_same_with_and_without_shared_prefix(build) -> None:  # noqa: ANN001
    requests = [make_request(p, 9, max_new_tokens=12) for p in random_prompts((1, 31, 32, 33, 65), seed=6)]
    with_prefix = by_answer(run(build(), requests))
    without = by_answer(run(build(share_prompt_prefix=False), requests))
    assert {key: one.token_ids for key, one in with_prefix.items()} == {
        key: one.token_ids for key, one in without.items()
    }


def test_requests_wait_for_blocks_and_all_blocks_come_back(build, tiny_llama: Path) -> None:  # noqa: ANN001
    engine = build(cache_tokens=160)  # 5 blocks of 32: two answers of 64 tokens at a time
    prompts = random_prompts((40, 10, 33, 50), seed=9)
    rollouts = run(engine, [make_request(p, 3, max_new_tokens=20) for p in prompts])
    assert len(by_answer(rollouts)) == 12
    assert largest_difference(tiny_llama, {p.id: p for p in prompts}, rollouts, 1.0) < 1e-4
    pool = engine._admission.pool
    assert pool.num_free == pool.num_blocks == 5


def test_a_request_larger_than_the_whole_cache_is_refused(build) -> None:  # noqa: ANN001
    engine = build(cache_tokens=64)
    with pytest.raises(ValueError, match="prompt big.*max_concurrent_rollouts"):
        run(engine, [make_request(make_prompt("big", [5] * 60), max_new_tokens=20)])


def test_a_prompt_of_another_vocabulary_is_refused(build) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match="prompt foreign: token 151.*tokenizer"):
        run(build(), [make_request(make_prompt("foreign", [5, 151]), max_new_tokens=2)])


def test_a_never_written_slot_of_the_cache_cannot_spread_nan(build, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN001
    """Rows of different lengths read blocks to their end, masked. With NaN there the engine must fail, loudly; with
    the zeros that it makes it must not. So the test shows that those slots are read at all.
    """
    requests = [make_request(p, 2, max_new_tokens=6) for p in random_prompts((3, 40), seed=1)]
    assert all(np.isfinite(rollout.logprobs).all() for rollout in run(build(), requests))
    zeros = KeyValueCache._zeros
    monkeypatch.setattr(KeyValueCache, "_zeros", lambda self: zeros(self).fill_(float("nan")))
    poisoned = build()
    with pytest.raises(FloatingPointError, match="prompt-. *, answer"):
        run(poisoned, requests)
    # It cleans the cache when it notices: the next rollout is sound.
    assert all(np.isfinite(rollout.logprobs).all() for rollout in run(poisoned, requests))


def test_weights_that_are_not_finite_are_reported_and_health_says_so(build, chunks) -> None:  # noqa: ANN001
    engine, weight = build(), chunks[0].decoder.layers[1].mlp.linear_fc2.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = float("nan")
    try:
        with pytest.raises(FloatingPointError, match="not finite"):
            run(engine, [make_request(make_prompt("nan", (5, 6)), max_new_tokens=2)])
        health = engine.health()
        assert not health.ok and "not finite" in health.detail
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert engine.health().ok


def test_the_model_comes_back_as_it_was(build, chunks) -> None:  # noqa: ANN001
    from megatron.core import parallel_state

    model = chunks[0].train()
    model.decoder.layers[0].eval()
    modes = [module.training for module in model.modules()]
    run(build(), [make_request(make_prompt("modes", (5, 6)), 2, max_new_tokens=4)])
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert parallel_state.get_global_memory_buffer().buffer == {}
    assert torch.is_grad_enabled()
    model.train()


def test_gradients_flow_after_a_rollout(build, chunks) -> None:  # noqa: ANN001
    """Nothing that generation left behind (rotary tables, buffers) may be an inference tensor."""
    run(build(), [make_request(make_prompt("before", (5, 6)), max_new_tokens=4)])
    model = chunks[0]
    hidden = model.decoder(hidden_states=torch.randn(4, 1, 64, requires_grad=True), attention_mask=None)
    hidden.sum().backward()
    assert model.decoder.layers[0].mlp.linear_fc1.weight.grad is not None
    model.zero_grad(set_to_none=True)


def test_new_weights_are_used_without_publishing(build, chunks) -> None:  # noqa: ANN001
    engine, request = build(), make_request(make_prompt("fresh", (5, 6)), max_new_tokens=12, temperature=0.0)
    (before,) = run(engine, [request])
    weight = chunks[0].decoder.layers[0].mlp.linear_fc1.weight
    with torch.no_grad():
        weight.neg_()
    (changed,) = run(engine, [request])
    with torch.no_grad():
        weight.neg_()
    (after,) = run(engine, [request])
    assert after.token_ids == before.token_ids != changed.token_ids


def test_sleep_gives_the_cache_back_and_generate_refuses_until_it_is_woken(build) -> None:  # noqa: ANN001
    engine = build()
    # 6 answers x 4 blocks of 32 and the padding block; 4 layers, 4 heads, 8 channels, float32, keys and values.
    assert engine.cache_bytes == 25 * 32 * 4 * 4 * 8 * 4 * 2
    engine.sleep(["weights"])
    assert engine.cache_bytes > 0
    engine.sleep(["kv_cache"])
    assert engine.cache_bytes == 0
    with pytest.raises(RuntimeError, match="asleep.*wake"):
        run(engine, [make_request(make_prompt("asleep", (5, 6)), max_new_tokens=2)])
    assert engine.health().detail == "kv_cache asleep"
    engine.wake(["kv_cache"])
    assert len(run(engine, [make_request(make_prompt("awake", (5, 6)), max_new_tokens=2)])) == 1


def test_a_stream_that_is_closed_early_leaves_the_engine_fit(build, chunks) -> None:  # noqa: ANN001
    engine = build()

    async def read_one() -> Rollout:
        requests = [make_request(p, 3, max_new_tokens=20) for p in random_prompts((5, 6, 7))]
        first = make_request(make_prompt("quick", (8,)), max_new_tokens=1)
        async with aclosing(engine.generate(ListSource([first, *requests]))) as stream:
            return await anext(stream)

    assert asyncio.run(read_one()).prompt_id == "quick"
    assert chunks[0].training
    assert engine._admission.pool.num_free == engine._admission.pool.num_blocks
    assert len(run(engine, [make_request(make_prompt("next", (5, 6)), 2, max_new_tokens=3)])) == 2


def test_text_is_decoded_from_the_answer(build) -> None:  # noqa: ANN001
    (rollout,) = run(build(), [make_request(make_prompt("text", (5, 6)), max_new_tokens=3)])
    assert rollout.text == " ".join(map(str, rollout.token_ids))


def test_what_the_engine_cannot_do_is_refused_by_name(build, chunks, single_rank_groups, tiny_llama) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match="modules.rollout.mtp_enabled"):
        build(mtp_enabled=True)
    with pytest.raises(ValueError, match="modules.rollout.tensor: 2"):
        build(tensor=2)
    with pytest.raises(ValueError, match="parallel.virtual_pipeline"):
        build_megatron_engine(
            [*chunks, *chunks], describe(tiny_llama), RolloutSection(), single_rank_groups, current_platform(), str, 64
        )


def test_the_layout_of_flash_attention_gives_the_same_answers(
    build,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,  # noqa: ANN001
) -> None:
    """With flash-attn's paged kernels (here a plain reading of their contract) the engine hands over tables and lengths
    instead of gathered blocks. What it does not show: the real kernels, which need a CUDA device.
    """
    from megatron.core.transformer import attention

    from grpo_megatron.platform.kernels import Kernels
    from grpo_megatron.rollout.megatron import build as building
    from tests.rollout import flash_reference

    monkeypatch.setattr(building, "choose_kernels", lambda: Kernels(False, True, False))
    monkeypatch.setattr(building, "FLASH_BLOCK_TOKENS", 16)
    monkeypatch.setattr(attention, "flash_attn_varlen_func", flash_reference.flash_attn_varlen_func)
    monkeypatch.setattr(attention, "flash_attn_with_kvcache", flash_reference.flash_attn_with_kvcache)
    monkeypatch.setattr(attention, "is_fa_min_version", lambda *_: True)
    prompts = random_prompts((1, 15, 16, 17, 40), seed=12)
    engine = build()
    greedy = by_answer(run(engine, [make_request(p, max_new_tokens=12, temperature=0.0) for p in prompts]))
    for prompt in prompts:
        assert list(greedy[prompt.id, 0].token_ids) == greedy_ids(tiny_llama, prompt, 12)
    sampled = run(engine, [make_request(p, 8, max_new_tokens=12) for p in prompts])
    assert largest_difference(tiny_llama, {p.id: p for p in prompts}, sampled, 1.0) < 1e-4
