"""What a rollout engine holds, as groups of the memory manager: freed where no phase needs it, made anew."""

from typing import Any

from grpo_megatron.memory.base import AwayTier, Tier
from grpo_megatron.rollout.base import EnginePart, RolloutEngine


class EnginePartGroup:
    """A `TensorGroup` whose owner is the rollout engine: its key-value cache, or weights of its own."""

    away: AwayTier = "discarded"

    def __init__(self, engine: RolloutEngine, part: EnginePart, *, name: str, num_bytes: int) -> None:
        self.name = name
        self._engine = engine
        self._part: EnginePart = part
        self.num_bytes = num_bytes
        self.tier: Tier = "device"

    def move(self, tier: Tier) -> None:
        if tier == self.tier:
            return
        if tier == "device":
            self._engine.wake([self._part])
        else:
            self._engine.sleep([self._part])
        self.tier = tier


def engine_groups(engine: Any) -> list[EnginePartGroup]:
    """Those parts of this engine that give memory back when they sleep."""
    if not engine.capabilities.frees_memory:
        return []
    groups = [EnginePartGroup(engine, "kv_cache", name="kv_cache", num_bytes=engine.cache_bytes)]
    if not engine.capabilities.shares_training_modules:
        weights = EnginePartGroup(engine, "weights", name="engine_weights", num_bytes=engine.weight_bytes)
        groups.insert(0, weights)  # weights wake before the cache
    return groups
