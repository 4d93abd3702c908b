"""Repairs of how megatron-core's distributed optimizer is saved and loaded. Each says what happens without it.

One concerns every optimizer. Three concern torch's AdamW, which stands in where neither Transformer Engine nor apex
is there: their fused Adam counts steps per parameter group, AdamW in a tensor per parameter, made at the first step.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


@cache
def repair() -> None:
    """Apply once what this version and this machine need."""
    # The mark of the bug: where it is mended, nothing has to be filled up with zeros any more.
    if "padded with zeros" in inspect.getsource(DistributedOptimizer.sharded_param_state_fully_reshardable):
        _repair_offsets_behind_padding()
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        _repair_step_counts()


def _repair_offsets_behind_padding() -> None:
    """Masters and moments are packed without the padding between buckets, then cut out at offsets that count it.

    Every parameter behind the first bucket is saved shifted, and the last ones partly as zeros. Tied embeddings on
    two pipeline stages are enough: they have a bucket of their own.
    """
    original = DistributedOptimizer.sharded_param_state_fully_reshardable

    def sharded_param_state(self: DistributedOptimizer, *args: Any, **kwargs: Any) -> Any:
        with _offsets_without_padding(self.buffers):
            return original(self, *args, **kwargs)

    DistributedOptimizer.sharded_param_state_fully_reshardable = sharded_param_state


@contextmanager
def _offsets_without_padding(buffers: list[Any]) -> Iterator[None]:
    maps = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            removed_before, removed = [], 0
            for (start, end), bucket in zip(buffer.bucket_indices, buffer.buckets, strict=True):
                removed_before.append(removed)
                removed += end - start - bucket.numel_unpadded
            buffer.param_index_map = {
                parameter: (start - removed_before[bucket], end - removed_before[bucket], bucket)
                for parameter, (start, end, bucket) in buffer.param_index_map.items()
            }
        yield
    finally:
        for buffer, original in zip(buffers, maps, strict=True):
            buffer.param_index_map = original


def _repair_step_counts() -> None:
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
