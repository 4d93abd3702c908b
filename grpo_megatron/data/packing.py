"""From scored rollouts and their advantages to packed micro-batches for every data-parallel rank.

Every rank computes the same plan from the same rollouts and lays out its own share; nothing is exchanged. The
denominators are counts over all ranks, so the gradient does not depend on how the rollouts were cut and packed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.batch import MicroBatch, MiniBatch, ScoredRollout, TrainBatch
from grpo_megatron.data.balance import (
    fill_micro_batches,
    split_by_budget,
    split_into_mini_batches,
    spread_over_replicas,
)
from grpo_megatron.data.blocks import Block, TrainedAnswer, lay_out


@dataclass(frozen=True)
class PackingSettings:
    """How a step's rollouts are cut.

    Example:
        >>> PackingSettings(num_replicas=2, num_mini_batches=1, micro_batch_tokens=100, pad_to_multiple=8).budget
        96
    """

    num_replicas: int
    num_mini_batches: int
    micro_batch_tokens: int
    share_prefix: bool = True
    """A prompt is computed once for the answers of its group."""
    pad_to_multiple: int = 1
    """Of every row's length: the tensor-parallel size under sequence parallelism, twice the context-parallel size."""
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(
                f"modules.training.micro_batch_tokens: {self.micro_batch_tokens} is below {self.pad_to_multiple}, the "
                "number of tokens that parallel ranks need; raise it"
            )

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch such that it stays within `micro_batch_tokens` when padded."""
        return self.micro_batch_tokens // self.pad_to_multiple * self.pad_to_multiple


def pack(
    scored: Sequence[ScoredRollout],
    advantages: Sequence[float | None],
    *,
    settings: PackingSettings,
    drop_reasons: Sequence[str | None] | None = None,
) -> list[TrainBatch]:
    """The batches of all data-parallel ranks. A rank that needs its own alone calls `pack_replica`.

    Args:
        scored: the step's rollouts; `rollout_ids` are indices into it. Its order has no influence on what is packed
            how: only prompt ids, indices and lengths have.
        advantages: one per rollout; None: not trained.
        drop_reasons: why a rollout with advantage None is not trained, for the counts; default `reward_error` where
            there is no score and `no_signal` elsewhere.
    """
    plan = _plan(scored, advantages, settings, drop_reasons)
    return [_lay_out_replica(plan, replica, settings) for replica in range(settings.num_replicas)]


def pack_replica(
    scored: Sequence[ScoredRollout],
    advantages: Sequence[float | None],
    *,
    replica: int,
    settings: PackingSettings,
    drop_reasons: Sequence[str | None] | None = None,
) -> TrainBatch:
    """The batch of one data-parallel rank: `pack(...)[replica]` without laying out the others."""
    return _lay_out_replica(_plan(scored, advantages, settings, drop_reasons), replica, settings)


def split_by_rollout(micro_batch: MicroBatch, values: np.ndarray) -> dict[int, np.ndarray]:
    """Values at the targets of a micro-batch, by rollout id, in the order of the answer's trained tokens."""
    assert len(values) == micro_batch.num_targets, f"{len(values)} values for {micro_batch.num_targets} targets"
    borders = np.flatnonzero(np.diff(micro_batch.rollout_ids)) + 1
    parts = np.split(values, borders) if len(values) else []
    first = micro_batch.rollout_ids[np.concatenate([[0], borders])] if len(values) else []
    return {int(rollout_id): part for rollout_id, part in zip(first, parts, strict=True)}


@dataclass(frozen=True)
class _MiniBatchPlan:
    replicas: tuple[tuple[tuple[Block, ...], ...], ...]
    """Replica -> micro-batch -> blocks, equally many micro-batches for every replica; one without blocks is padding."""
    num_loss_tokens: int
    num_loss_rollouts: int


@dataclass(frozen=True)
class _Plan:
    mini_batches: tuple[_MiniBatchPlan, ...]
    num_rollouts: int
    num_dropped: dict[str, int]


def _plan(
    scored: Sequence[ScoredRollout],
    advantages: Sequence[float | None],
    settings: PackingSettings,
    drop_reasons: Sequence[str | None] | None,
) -> _Plan:
    reasons = drop_reasons if drop_reasons is not None else [None] * len(scored)
    assert len(scored) == len(advantages) == len(reasons), (len(scored), len(advantages), len(reasons))
    groups: dict[str, list[TrainedAnswer]] = {}
    dropped: Counter[str] = Counter()
    for rollout_id, (one, advantage, reason) in enumerate(zip(scored, advantages, reasons, strict=True)):
        reason = _reason_to_drop(one, advantage, reason)
        if reason is not None or advantage is None:
            dropped[reason or "no_signal"] += 1
        else:
            groups.setdefault(one.prompt.id, []).append(TrainedAnswer(rollout_id, one, advantage))
    whole = [_whole_group(answers) for answers in groups.values()]
    parts = split_into_mini_batches(whole, settings.num_mini_batches)
    return _Plan(
        mini_batches=tuple(_plan_mini_batch(part, settings) for part in parts),
        num_rollouts=sum(len(answers) for answers in groups.values()),
        num_dropped=dict(sorted(dropped.items())),
    )


def _reason_to_drop(one: ScoredRollout, advantage: float | None, given: str | None) -> str | None:
    assert one.prompt.id == one.rollout.prompt_id, f"prompt {one.prompt.id} with a rollout of {one.rollout.prompt_id}"
    assert one.prompt.token_ids, f"prompt {one.prompt.id} has no tokens"
    if advantage is None:
        return given or ("reward_error" if one.reward.score is None else "no_signal")
    assert np.isfinite(advantage), f"rollout {one.rollout.prompt_id}[{one.rollout.index}]: advantage {advantage}"
    return None if any(one.rollout.loss_mask) else "no_trained_tokens"


def _whole_group(answers: Sequence[TrainedAnswer]) -> Block:
    ordered = sorted(answers, key=lambda answer: answer.scored.rollout.index)
    indices = [answer.scored.rollout.index for answer in ordered]
    prompt = ordered[0].scored.prompt
    assert len(set(indices)) == len(indices), f"prompt {prompt.id}: an index of its group occurs twice, {indices}"
    return Block(prompt, tuple(ordered))


def _plan_mini_batch(groups: Sequence[Block], settings: PackingSettings) -> _MiniBatchPlan:
    """A mini-batch without anything to train is one micro-batch of padding per replica and has 0 loss tokens."""
    blocks = [
        block
        for group in groups
        for block in split_by_budget(group, budget=settings.budget, share_prefix=settings.share_prefix)
    ]
    filled = [
        fill_micro_batches(share, settings.budget) for share in spread_over_replicas(blocks, settings.num_replicas)
    ]
    num_micro_batches = max(1, *(len(micro_batches) for micro_batches in filled))
    answers = [answer for group in groups for answer in group.answers]
    return _MiniBatchPlan(
        replicas=tuple(
            tuple(tuple(blocks) for blocks in micro_batches) + ((),) * (num_micro_batches - len(micro_batches))
            for micro_batches in filled
        ),
        num_loss_tokens=sum(answer.num_trained_tokens for answer in answers),
        num_loss_rollouts=len(answers),
    )


def _lay_out_replica(plan: _Plan, replica: int, settings: PackingSettings) -> TrainBatch:
    return TrainBatch(
        mini_batches=tuple(
            MiniBatch(
                micro_batches=tuple(
                    lay_out(blocks, pad_to_multiple=settings.pad_to_multiple, pad_token_id=settings.pad_token_id)
                    for blocks in each.replicas[replica]
                ),
                num_loss_tokens=each.num_loss_tokens,
                num_loss_rollouts=each.num_loss_rollouts,
            )
            for each in plan.mini_batches
        ),
        num_rollouts=plan.num_rollouts,
        num_dropped=plan.num_dropped,
    )
