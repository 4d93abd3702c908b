"""What is trained and what is left out, with its reason."""

import pytest

from grpo_megatron.batch import Prompt, RewardResult, RewardSpec, Rollout, ScoredRollout, VersionSpan
from grpo_megatron.config.schema import KlSection, TrainingSection
from grpo_megatron.data.packing import PackingSettings
from grpo_megatron.scheduler.batches import Batches, StepBatch
from grpo_megatron.scheduler.scores import ScoredStep

pytestmark = pytest.mark.unit


class _OneReplica:
    replica = 0


def _scored(prompt_id: str, scores: list[float | None], finish: str = "stop") -> list[ScoredRollout]:
    prompt = Prompt(prompt_id, (5, 6), "", RewardSpec("exact"))
    return [
        ScoredRollout(
            prompt,
            Rollout(prompt_id, index, (7, 8, 2), (-1.0, -1.0, -1.0), finish, (VersionSpan(0, 3, 0),)),  # type: ignore[arg-type]
            RewardResult(score, error=None if score is not None else "timeout: no answer"),
        )
        for index, score in enumerate(scores)
    ]


def _build(scored: list[ScoredRollout], **section) -> StepBatch:  # noqa: ANN003
    settings = PackingSettings(num_replicas=1, num_mini_batches=1, micro_batch_tokens=100)
    batches = Batches(TrainingSection(**section), settings, _OneReplica())  # type: ignore[arg-type]
    return batches.build(ScoredStep(0, tuple(scored), (), 1.0, 0))


def test_a_group_without_signal_is_left_out_of_every_denominator() -> None:
    """Case G1: eight rewards of 0.1 have advantage exactly 0."""
    batch = _build([*_scored("a", [0.1] * 8), *_scored("b", [1.0, 0.0])])
    assert batch.groups.advantages[:8] == (0.0,) * 8
    assert batch.train.num_dropped == {"no_signal": 8}
    assert batch.train.mini_batches[0].num_loss_tokens == 6
    assert batch.train.mini_batches[0].num_loss_rollouts == 2


def test_with_a_kl_term_a_group_without_signal_still_pulls_towards_the_reference() -> None:
    batch = _build(_scored("a", [1.0, 1.0]), kl=KlSection(coefficient=0.1))
    assert batch.trained_advantages == (0.0, 0.0)
    assert batch.train.mini_batches[0].num_loss_tokens == 6


def test_failed_rollouts_are_no_members_of_their_group() -> None:
    """Case G4: mean 0.5 and standard deviation sqrt(1/2) of the two that have a score."""
    batch = _build(_scored("a", [1.0, None, 0.0]), advantage_scale="none")
    assert batch.trained_advantages == (0.5, None, -0.5)
    assert batch.train.num_dropped == {"reward_error": 1}


def test_truncated_answers_count_for_the_mean_and_are_not_trained() -> None:
    """Case L7."""
    scored = [*_scored("a", [1.0, 0.0]), *_scored("b", [1.0, 0.0], finish="length")]
    assert _build(scored).train.num_dropped == {}
    batch = _build(scored, mask_truncated=True)
    assert batch.train.num_dropped == {"truncated": 2}
    assert batch.train.mini_batches[0].num_loss_tokens == 6


def test_a_step_without_any_signal_has_one_empty_mini_batch() -> None:
    batch = _build(_scored("a", [0.0, 0.0]))
    (mini_batch,) = batch.train.mini_batches
    assert mini_batch.num_loss_tokens == 0
    assert all(micro_batch.num_targets == 0 for micro_batch in mini_batch.micro_batches)
