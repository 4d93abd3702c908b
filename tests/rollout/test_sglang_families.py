"""A gate per family: log-probs of a real SGLang server against HF, greedy and sampled, float32 and bfloat16."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from grpo_megatron.families.describe import known_families
from grpo_megatron.rollout.sglang.engine import SglangEngine
from tests.rollout.oracle import greedy_ids, largest_difference, logprobs
from tests.rollout.requests import by_answer, make_request, random_prompts, run
from tests.rollout.sglang_server import NEEDS_SGLANG, start_sglang
from tests.tiny import make_tiny_llama, make_tiny_qwen2

pytestmark = [pytest.mark.engines, NEEDS_SGLANG]

FLOAT32_BOUND = 1e-4
BFLOAT16_MEAN_BOUND = 0.01
"""Mean |log-prob difference| of bfloat16 layers with a float32 head, against HF's float32 of the same weights."""
BFLOAT16_MAX_BOUND = 0.1


def make_untied_llama(folder: Path) -> Path:
    return make_tiny_llama(folder, tie_embeddings=False, seed=3)


FAMILIES: dict[str, Callable[[Path], Path]] = {"llama": make_untied_llama, "qwen2": make_tiny_qwen2}


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, SglangEngine]]:
    folder = FAMILIES[request.param](tmp_path_factory.mktemp(request.param))
    engine = start_sglang(folder, tmp_path_factory.mktemp("logs"))
    engine.set_version(0)
    yield folder, engine
    engine.close()


def test_every_family_is_here() -> None:
    """A new family comes with a model for this gate."""
    assert set(known_families()) == set(FAMILIES)


def test_greedy_ids_are_those_of_hf(served: tuple[Path, SglangEngine]) -> None:
    folder, engine = served
    prompts = random_prompts((1, 17, 40), seed=5)
    rollouts = by_answer(run(engine, [make_request(p, max_new_tokens=16, temperature=0.0) for p in prompts]))
    for prompt in prompts:
        assert list(rollouts[prompt.id, 0].token_ids) == greedy_ids(folder, prompt, 16)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_those_of_hf_at_every_temperature(served: tuple[Path, SglangEngine], temperature: float) -> None:
    folder, engine = served
    prompts = {prompt.id: prompt for prompt in random_prompts((1, 9, 33, 40), seed=6)}
    rollouts = run(engine, [make_request(p, 4, max_new_tokens=24, temperature=temperature) for p in prompts.values()])
    assert largest_difference(folder, prompts, rollouts, temperature) < FLOAT32_BOUND


def test_bfloat16_with_a_float32_head_stays_within_its_bound(tmp_path: Path) -> None:
    """The engine's weights are rounded once; HF has the same rounded weights and computes in float32."""
    from transformers import AutoModelForCausalLM

    source = make_tiny_qwen2(tmp_path / "float32")
    rounded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    rounded.float().save_pretrained(tmp_path / "rounded")
    engine = start_sglang(tmp_path / "rounded", tmp_path, dtype="bfloat16")
    try:
        engine.set_version(0)
        prompts = {prompt.id: prompt for prompt in random_prompts((1, 9, 33, 40), seed=6)}
        rollouts = run(engine, [make_request(p, 4, max_new_tokens=24) for p in prompts.values()])
    finally:
        engine.close()
    differences = [
        abs(ours - theirs)
        for rollout in rollouts
        for ours, theirs in zip(
            rollout.logprobs, logprobs(tmp_path / "rounded", prompts[rollout.prompt_id], rollout, 1.0), strict=True
        )
    ]
    mean, largest = sum(differences) / len(differences), max(differences)
    assert mean < BFLOAT16_MEAN_BOUND and largest < BFLOAT16_MAX_BOUND, (mean, largest)
    assert mean > 1e-5, "this was not bfloat16"
