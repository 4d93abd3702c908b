"""Bringing a new version of the policy to the rollout engine."""

from grpo_megatron.rollout.base import RolloutEngine
from grpo_megatron.weights.publish import Publisher, PublishReport


class PolicyWeights:
    """Publishes through buckets where the engine has weights of its own; the embedded engine only hears the number."""

    def __init__(self, engine: RolloutEngine, publisher: Publisher | None) -> None:
        assert engine.capabilities.shares_training_modules == (publisher is None)
        self._engine = engine
        self._publisher = publisher
        self.report: PublishReport | None = None

    def publish(self, version: int) -> None:
        """After this the engine samples from `version`. Collective over the world."""
        if self._publisher is not None:
            self.report = self._publisher.publish(version)
        self._engine.set_version(version)
