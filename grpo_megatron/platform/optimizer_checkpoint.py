"""Three repairs of megatron-core's distributed optimizer around torch's AdamW.

megatron-core is written for the fused Adam of Transformer Engine or apex, which counts steps per parameter group.
torch's AdamW counts them in a tensor per parameter, made at the first step; saving and loading trip over that.
`repair()` changes nothing where one of the two libraries is there.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@cache
def repair() -> bool:
    """Apply the repairs once; returns whether they were needed."""
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return False
    original_state_dict = DistributedOptimizer.state_dict
    original_load = DistributedOptimizer.load_state_dict

    def state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        # Asserts that all parameters share one step count: there is none before the first step.
        _make_missing_states(self.optimizer)
        return original_state_dict(self)

    def load_state_dict(self: DistributedOptimizer, state: Mapping[str, Any]) -> None:
        _make_missing_states(self.optimizer)
        original_load(self, state)
        # Gives every parameter the same step tensor. AdamW would then advance it once per parameter, and the bias
        # correction, hence the training, would silently differ from the run that was saved.
        for parameter_state in self.optimizer.state.values():
            parameter_state["step"] = parameter_state["step"].clone()

    def set_states(self: DistributedOptimizer, model_parameter: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        # Asks the checkpoint for a `step` tensor of each parameter, which is not stored there: KeyError.
        group, position = self.model_param_group_index_map[model_parameter]
        parameter = self.optimizer.param_groups[group]["params"][position]
        for name, target in {"param": parameter, **self.optimizer.state[parameter]}.items():
            if name != "step":
                target.copy_(tensors[name])

    DistributedOptimizer.state_dict = state_dict
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    return True


def _make_missing_states(optimizer: torch.optim.Optimizer) -> None:
    """The state that AdamW itself would make at its first step."""
    for group in optimizer.param_groups:
        step_on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "step" not in state:
                device = parameter.device if step_on_device else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
