"""A table of phases and a manager over a tiny policy, as a run has them."""

from pathlib import Path
from typing import Any

from grpo_megatron.memory.manager import MemoryManager
from grpo_megatron.memory.owners import frozen_group, policy_groups
from grpo_megatron.memory.planner import OffloadPolicy, make_planner
from grpo_megatron.platform.device import current_platform
from tests.checkpoint.policies import TinyPolicy

NEEDS = {
    "rollout": frozenset({"policy_parameters", "kv_cache"}),
    "score": frozenset({"policy_parameters", "reference_parameters"}),
    "update": frozenset({"policy_parameters", "policy_gradients", "optimizer_masters", "optimizer_moments"}),
    "nothing": frozenset(),
}
CHECKPOINT = NEEDS["update"] - {"policy_gradients"}


def make_manager(policy: TinyPolicy, folder: Path, *, offload: OffloadPolicy, reference: Any = ()) -> MemoryManager:
    platform = current_platform()
    groups = [
        *policy_groups(policy.trainer.wrapped, policy.trainer.optimizer, platform=platform, far_folder=folder),
        frozen_group("reference_parameters", reference, platform=platform, far_folder=folder),
    ]
    return MemoryManager(groups, planner=make_planner(offload), needs=NEEDS)


def run_steps(policy: TinyPolicy, manager: MemoryManager, steps: range) -> list[dict[str, float]]:
    history = []
    for step in steps:
        manager.enter("rollout")
        manager.enter("score")
        manager.enter("update")
        history += policy.train(range(step, step + 1))
    manager.require("checkpoint", CHECKPOINT)
    return history
