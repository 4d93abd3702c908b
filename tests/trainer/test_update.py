"""What one optimizer step does to the weights on a single rank. Layouts are compared in tests/distributed."""

from dataclasses import replace

import pytest
import torch

from grpo_megatron.batch import MiniBatch
from grpo_megatron.config.schema import TrainingSection
from grpo_megatron.platform.device import current_platform
from grpo_megatron.trainer.policy import PolicyTrainer
from tests.building import ADVANTAGES, ANSWERS, PROMPT, build_tiny_policy, pack_by_hand

pytestmark = pytest.mark.numerics


@pytest.fixture
def trainer(tiny_llama, single_rank_groups) -> PolicyTrainer:  # noqa: ANN001
    chunks = build_tiny_policy(tiny_llama, single_rank_groups, dtype="bfloat16")
    return PolicyTrainer(chunks, TrainingSection(), temperature=1.0, platform=current_platform())


def _weights(trainer: PolicyTrainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.chunks[0].parameters()]


def _mini_batch() -> MiniBatch:
    return MiniBatch((pack_by_hand(PROMPT, ANSWERS, advantages=ADVANTAGES),), 15, 4)


def test_a_learning_rate_of_zero_leaves_the_loaded_weights(trainer: PolicyTrainer) -> None:
    """The fp32 masters are those of the loaded weights: older ones would be written over them."""
    before = _weights(trainer)
    stats = trainer.update(_mini_batch(), learning_rate=0.0, first_mini_batch=True)
    assert stats.stepped and stats.gradient_norm > 0
    assert all(torch.equal(old, new) for old, new in zip(before, _weights(trainer), strict=True))


def test_a_gradient_that_is_not_finite_is_not_applied(trainer: PolicyTrainer) -> None:
    before = _weights(trainer)
    mini_batch = _mini_batch()
    (micro_batch,) = mini_batch.micro_batches
    advantages = micro_batch.advantages.copy()
    advantages[3] = float("nan")
    broken = replace(mini_batch, micro_batches=(replace(micro_batch, advantages=advantages),))
    stats = trainer.update(broken, learning_rate=1e-2, first_mini_batch=True)
    assert not stats.stepped and stats.gradient_norm != stats.gradient_norm
    assert all(torch.equal(old, new) for old, new in zip(before, _weights(trainer), strict=True))
    assert trainer.update(mini_batch, learning_rate=1e-2, first_mini_batch=True).stepped
    moved = [not torch.equal(old, new) for old, new in zip(before, _weights(trainer), strict=True)]
    assert all(moved), "a good step after it moves every weight"
