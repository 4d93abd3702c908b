"""Bringing a new version of the policy to the rollout engines, also to one that dies on the way."""

from collections.abc import Callable

from grpo_megatron.parallel.collectives import agree
from grpo_megatron.parallel.errors import RankFailure
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.rollout.base import RolloutEngine
from grpo_megatron.weights.publish import Publisher, PublishReport

MAX_ATTEMPTS = 3
"""Of one publish. An engine that dies in it is restarted between two; one that lives and refuses ends the run."""


class PolicyWeights:
    """Publishes through buckets where the engine has weights of its own; the embedded engine only hears the number.

    Args:
        revive: restarts this rank's engine if it is gone; None with the embedded engine.
        warn: told why an attempt failed.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        publisher: Publisher | None,
        groups: Groups,
        *,
        revive: Callable[[], None] | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        assert engine.capabilities.shares_training_modules == (publisher is None)
        self._engine = engine
        self._publisher = publisher
        self._groups = groups
        self._revive = revive
        self._warn = warn
        self._version = -1

    def publish(self, version: int) -> PublishReport | None:
        """After this every engine samples from `version`; None with the embedded engine. Collective over the world.

        Raises:
            RankFailure: on every rank; the engine says no every time, or cannot be restarted.
        """
        self._version = version
        if self._publisher is None:
            self._engine.set_version(version)
            return None
        return self._bring(self._publisher, only_lost=False)

    def restore(self) -> None:
        """Bring the current version to engines that were restarted. Collective over the world; raises as `publish`."""
        assert self._publisher is not None, "the embedded engine cannot lose its weights"
        self._bring(self._publisher, only_lost=True)

    def _bring(self, publisher: Publisher, *, only_lost: bool) -> PublishReport:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            self._revive_here()
            try:
                return publisher.publish(self._version, here=self._engine.needs_weights or not only_lost)
            except RankFailure as failure:
                if attempt == MAX_ATTEMPTS:
                    raise
                self._warn(f"{failure}; trying again ({attempt} of {MAX_ATTEMPTS - 1})")
        raise AssertionError("unreachable")

    def _revive_here(self) -> None:
        error = None
        if self._revive is not None:
            try:
                self._revive()
            except RuntimeError as failure:
                error = str(failure)
        agree(error, self._groups.world, "engine before the publish")
