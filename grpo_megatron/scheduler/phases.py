"""What each phase of a step needs on the device. `run.phase(name)` asks the memory manager for exactly this."""

from collections.abc import Mapping
from typing import Literal

from grpo_megatron.config.schema import PhaseName

GroupName = Literal[
    "policy_parameters",
    "policy_gradients",
    "optimizer_masters",
    "optimizer_moments",
    "reference_parameters",
    "engine_weights",
    "kv_cache",
]

PHASES: Mapping[PhaseName, frozenset[GroupName]] = {
    # The embedded engine generates on the trainer's own parameters.
    "rollout": frozenset({"policy_parameters", "kv_cache"}),
    # The policy's own log-probs are taken here too, where an update has several mini-batches.
    "score": frozenset({"policy_parameters", "reference_parameters"}),
    "update": frozenset({"policy_parameters", "policy_gradients", "optimizer_masters", "optimizer_moments"}),
    "publish": frozenset({"policy_parameters"}),
}

PHASES_WITH_ENGINE_WEIGHTS: Mapping[PhaseName, frozenset[GroupName]] = {
    **PHASES,
    "rollout": frozenset({"engine_weights", "kv_cache"}),
    "publish": frozenset({"policy_parameters", "engine_weights"}),
}
"""The same with an engine in a process of its own: it has weights of its own, new ones with every publish."""

CHECKPOINT_NEEDS: frozenset[GroupName] = frozenset({"policy_parameters", "optimizer_masters", "optimizer_moments"})
"""What a checkpoint reads."""
