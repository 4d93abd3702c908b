"""What every reward promises. This folder imports no deep-learning framework."""

from typing import Protocol

from grpo_megatron.batch import Prompt, RewardResult, Rollout


class Reward(Protocol):
    """Scores one rollout. Runs in a worker process and may fail, hang or die there: the pool deals with it."""

    def score(self, prompt: Prompt, rollout: Rollout) -> RewardResult: ...
