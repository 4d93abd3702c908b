"""From finished rollouts to scored ones, the same list on every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_megatron.batch import Prompt, RewardResult, Rollout, ScoredRollout
from grpo_megatron.parallel.collectives import agree, gather_objects
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.rewards.pool import RewardFailure, RewardPool, RewardPoolStats, RolloutKey


@dataclass(frozen=True)
class StepRollouts:
    """What the rollout phase of one step gave on this rank."""

    step: int
    prompts: tuple[Prompt, ...]
    """All prompts of the step, in the sampler's order, the same on every rank."""
    rollouts: tuple[Rollout, ...]
    """Those of this rank's engine, on its leader; empty elsewhere."""
    seconds: float
    """How long this rank's engine generated."""
    num_restarts: int
    """Engines that were lost meanwhile, of the whole run."""


@dataclass(frozen=True)
class ScoredStep:
    """All rollouts of one step with their rewards, sorted by prompt and index, the same on every rank."""

    step: int
    scored: tuple[ScoredRollout, ...]
    rewards: tuple[RewardPoolStats, ...]
    """One per engine."""
    rollout_seconds: float
    """Of the slowest engine."""
    num_restarts: int
    """Engines that were lost in the rollout."""


class Scores:
    """Collects what the reward workers made of the rollouts while others were still being written."""

    def __init__(
        self,
        pool: RewardPool | None,
        groups: Groups,
        *,
        deadline_seconds: float,
    ) -> None:
        self._pool = pool  # on leaders only
        self._groups = groups
        self._deadline_seconds = deadline_seconds

    def collect(self, step: StepRollouts) -> ScoredStep:
        """Wait for the rewards of this rank's rollouts and exchange them. Collective over the world.

        Raises:
            RankFailure: on every rank, if a reward failed and the policy is `fail`.
        """
        results: Mapping[RolloutKey, RewardResult] = {}
        stats, error = None, None
        if self._pool is not None:
            try:
                results = self._pool.collect(self._deadline_seconds)
            except RewardFailure as failure:
                error = str(failure)
            stats = self._pool.stats()
        agree(error, self._groups.world, f"rewards of step {step.step + 1}")
        prompts = {prompt.id: prompt for prompt in step.prompts}
        mine = [
            ScoredRollout(prompts[rollout.prompt_id], rollout, results[rollout.prompt_id, rollout.index])
            for rollout in step.rollouts
        ]
        parts = gather_objects((mine, stats, step.seconds), self._groups.world)
        return ScoredStep(
            step=step.step,
            scored=_in_order(step.prompts, [each for part, _, _ in parts for each in part]),
            rewards=tuple(each for _, each, _ in parts if each is not None),
            rollout_seconds=max(seconds for _, _, seconds in parts),
            num_restarts=step.num_restarts,
        )


def _in_order(prompts: Sequence[Prompt], scored: Sequence[ScoredRollout]) -> tuple[ScoredRollout, ...]:
    """By the order of prompts and the index in the group: who generated what leaves no trace."""
    position = {prompt.id: index for index, prompt in enumerate(prompts)}
    return tuple(sorted(scored, key=lambda each: (position[each.prompt.id], each.rollout.index)))
