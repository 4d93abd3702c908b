"""From scored rollouts to this replica's packed mini-batches, and the log-probs that an update needs besides."""

from dataclasses import dataclass, replace
from typing import Literal

from grpo_megatron.algorithms.advantages import GroupAdvantages, group_advantages
from grpo_megatron.batch import ScoredRollout, TrainBatch
from grpo_megatron.config.schema import TrainingSection
from grpo_megatron.data.packing import PackingSettings, pack_replica
from grpo_megatron.forward.logprobs import LogprobScorer
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.scheduler.scores import ScoredStep

DropReason = Literal["reward_error", "no_signal", "truncated"]


@dataclass(frozen=True)
class StepBatch:
    """What one step trains on."""

    train: TrainBatch
    """This replica's share."""
    groups: GroupAdvantages
    trained_advantages: tuple[float | None, ...]
    """Per rollout of the step; None where it is not trained."""
    drop_reasons: tuple[DropReason | None, ...]


class Batches:
    """Advantages per group, then packing. Every rank computes the same plan and lays out its own share."""

    def __init__(self, section: TrainingSection, settings: PackingSettings, groups: Groups) -> None:
        self._section = section
        self._settings = settings
        self._replica = groups.replica

    def build(self, step: ScoredStep) -> StepBatch:
        """Not collective: everything it needs is on every rank."""
        members = [(each.prompt.id, each.reward.score) for each in step.scored]
        groups = group_advantages(members, scale=self._section.advantage_scale)
        reasons = tuple(
            self._drop_reason(each, advantage, signal)
            for each, advantage, signal in zip(step.scored, groups.advantages, groups.has_signal, strict=True)
        )
        trained = tuple(
            advantage if reason is None else None for advantage, reason in zip(groups.advantages, reasons, strict=True)
        )
        train = pack_replica(step.scored, trained, replica=self._replica, settings=self._settings, drop_reasons=reasons)
        return StepBatch(train, groups, trained, reasons)

    def _drop_reason(self, each: ScoredRollout, advantage: float | None, has_signal: bool) -> DropReason | None:
        if advantage is None:
            return "reward_error"
        if self._section.mask_truncated and each.rollout.finish_reason == "length":
            return "truncated"
        # With a KL term a group without signal still pulls towards the reference.
        return "no_signal" if not has_signal and self._section.kl.coefficient == 0 else None


class ForwardPasses:
    """Attaches log-probs of the reference, and of the policy before its update, where the loss reads them."""

    def __init__(self, section: TrainingSection, *, policy: LogprobScorer, reference: LogprobScorer | None) -> None:
        self._section = section
        self._policy = policy
        self._reference = reference

    def attach(self, batch: StepBatch) -> StepBatch:
        """Collective over the replica."""
        train = batch.train
        if self._reference is not None:
            train = self._reference.attach(train, "reference_logprobs")
        if self._needs_proximal(train):
            train = self._policy.attach(train, "proximal_logprobs")
        return replace(batch, train=train)

    def _needs_proximal(self, train: TrainBatch) -> bool:
        """With a single mini-batch the update's own forward gives the same numbers, and the ratio is exactly 1."""
        if len(train.mini_batches) == 1:
            return False
        return self._section.ratio_reference == "proximal" or self._section.mismatch.correction != "none"
