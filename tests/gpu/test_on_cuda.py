"""The path of a step on a CUDA device, against HF transformers on the CPU. README.md: what has been seen running."""

import pytest
import torch

from tests.building import ADVANTAGES, ANSWERS, PROMPT, answers_after, build_tiny_policy, pack_by_hand
from tests.rollout.oracle import greedy_ids
from tests.rollout.requests import make_request, random_prompts, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def _trainer(chunks):  # noqa: ANN001, ANN202
    from grpo_megatron.config.schema import TrainingSection
    from grpo_megatron.platform.device import current_platform
    from grpo_megatron.trainer.policy import PolicyTrainer

    section = TrainingSection(clip_gradient_norm=100.0)
    return PolicyTrainer(chunks, section, temperature=1.0, platform=current_platform())


def test_an_update_equals_that_of_hf(tiny_llama, single_rank_groups) -> None:  # noqa: ANN001
    """Loss and gradient norm of one mini-batch in float32; the ratio is exactly 1."""
    from transformers import AutoModelForCausalLM

    from grpo_megatron.batch import MiniBatch

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    logprobs = answers_after(model, PROMPT, ANSWERS)
    weights = torch.cat([torch.full((len(a),), v) for a, v in zip(ANSWERS, ADVANTAGES, strict=True)])
    (-(logprobs * weights).sum() / len(weights)).backward()
    norm = torch.stack([parameter.grad.norm() ** 2 for parameter in model.parameters()]).sum().sqrt().item()

    trainer = _trainer(build_tiny_policy(tiny_llama, single_rank_groups))
    batch = pack_by_hand(PROMPT, ANSWERS, advantages=ADVANTAGES)
    mini_batch = MiniBatch((batch,), len(weights), len(ANSWERS))
    stats = trainer.update(mini_batch, learning_rate=1e-3, first_mini_batch=True)
    assert abs(stats.gradient_norm - norm) < 1e-4 * norm
    assert stats.sums[0].maxima["policy/ratio_max"].item() == 1.0


def test_greedy_ids_equal_those_of_hf(tiny_llama, single_rank_groups) -> None:  # noqa: ANN001
    from grpo_megatron.config.schema import RolloutSection
    from grpo_megatron.families.describe import describe
    from grpo_megatron.platform.device import current_platform
    from grpo_megatron.rollout.megatron.build import build_megatron_engine

    engine = build_megatron_engine(
        build_tiny_policy(tiny_llama, single_rank_groups),
        describe(tiny_llama),
        RolloutSection(engine="megatron", max_concurrent_rollouts=6),
        single_rank_groups,
        current_platform(),
        lambda token_ids: "",
        128,
    )
    prompts = random_prompts([5, 17, 2])
    rollouts = run(engine, [make_request(prompt, max_new_tokens=12, temperature=0.0) for prompt in prompts])
    by_prompt = {rollout.prompt_id: list(rollout.token_ids) for rollout in rollouts}
    for prompt in prompts:
        assert by_prompt[prompt.id] == greedy_ids(tiny_llama, prompt, 12)


def test_moving_everything_off_frees_device_memory_and_brings_the_same_bytes_back(
    tmp_path,
    tiny_llama,
    single_rank_groups,  # noqa: ANN001
) -> None:
    from grpo_megatron.memory.owners import policy_groups
    from grpo_megatron.platform.device import current_platform

    chunks = build_tiny_policy(tiny_llama, single_rank_groups)
    trainer = _trainer(chunks)
    before = {name: parameter.detach().cpu().clone() for name, parameter in chunks[0].named_parameters()}
    groups = policy_groups(trainer.wrapped, trainer.optimizer, platform=current_platform(), far_folder=tmp_path)
    num_bytes = sum(group.num_bytes for group in groups)
    resident = torch.cuda.memory_allocated()
    for group in groups:
        group.move(group.away)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= resident - 0.9 * num_bytes
    for group in groups:
        group.move("device")
    torch.cuda.synchronize()
    for name, parameter in chunks[0].named_parameters():
        assert torch.equal(parameter.detach().cpu(), before[name]), name
    for group in groups:
        group.close()
