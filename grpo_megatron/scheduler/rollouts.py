"""Where the rollouts of a step come from. `take` and `start` are the seam between sync and async."""

from typing import Protocol

from grpo_megatron.batch import Prompt, Rollout
from grpo_megatron.config.schema import RolloutSection
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout.base import SamplingSettings
from grpo_megatron.scheduler.generation import Generation
from grpo_megatron.scheduler.scores import StepRollouts


class Rollouts(Protocol):
    """A source of rollouts for the loop."""

    def take(self, step: int) -> StepRollouts:
        """The rollouts that this step trains on. Collective over the world."""

    def start(self, step: int) -> None:
        """Begin with rollouts of a later step, if this source works ahead."""


class SyncRollouts:
    """Generates a step's rollouts when they are asked for; their rewards are computed meanwhile."""

    def __init__(
        self,
        sampler: PromptSampler,
        generation: Generation,
        pool: RewardPool | None,
        *,
        section: RolloutSection,
        sampling: SamplingSettings,
        seed: int,
    ) -> None:
        self._sampler = sampler
        self._generation = generation
        self._pool = pool
        self._section = section
        self._sampling = sampling
        self._seed = seed

    def take(self, step: int) -> StepRollouts:
        """Draw prompts, generate their groups, hand every answer to the reward workers as it ends."""
        prompts = tuple(self._sampler.next(self._section.batch_size))
        generated = self._generation.run(
            prompts,
            num_rollouts=self._section.group_size,
            sampling=self._sampling,
            seed=self._seed * 1_000_003 + step,  # a prompt that comes again is answered anew
            name=f"rollout of step {step + 1}",
            on_rollout=self._submit,
        )
        return StepRollouts(step, prompts, generated.rollouts, generated.seconds, generated.num_restarts)

    def start(self, step: int) -> None:
        """Nothing: the policy of that step is not there yet."""

    def _submit(self, prompt: Prompt, rollout: Rollout) -> None:
        assert self._pool is not None, "rollouts end on the leader, which has the reward workers"
        self._pool.submit(prompt, rollout)
