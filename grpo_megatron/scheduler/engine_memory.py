"""The engine's key-value cache as a group of the memory manager: freed where no phase needs it, made anew."""

from grpo_megatron.memory.base import AwayTier, Tier
from grpo_megatron.rollout.base import RolloutEngine


class CacheGroup:
    """A `TensorGroup` whose owner is the rollout engine."""

    name = "kv_cache"
    away: AwayTier = "discarded"

    def __init__(self, engine: RolloutEngine, *, num_bytes: int) -> None:
        self._engine = engine
        self.num_bytes = num_bytes
        self.tier: Tier = "device"

    def move(self, tier: Tier) -> None:
        if tier == self.tier:
            return
        if tier == "device":
            self._engine.wake(["kv_cache"])
        else:
            self._engine.sleep(["kv_cache"])
        self.tier = tier
