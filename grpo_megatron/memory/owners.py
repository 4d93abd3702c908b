"""The groups of the owners in a training rank: policy, gradients, masters, moments, frozen models.

Reads megatron-core's wrapper and optimizer by their attributes and imports neither.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.memory.far import make_far_space
from grpo_megatron.memory.storage_group import NamedTensors, StorageGroup
from grpo_megatron.platform.device import Platform


def policy_groups(
    wrapped: Sequence[Any], optimizer: Any, *, platform: Platform, far_folder: Path
) -> tuple[StorageGroup, ...]:
    """`policy_parameters`, `policy_gradients`, `optimizer_masters`, `optimizer_moments`.

    Without bfloat16 the masters are views of the parameters; their group is then empty, and they move with the policy.
    """

    def group(name: str, tensors: Callable[[], NamedTensors]) -> StorageGroup:
        return StorageGroup(name, tensors, platform=platform, space=make_far_space(platform, far_folder))

    return (
        group("policy_parameters", lambda: _parameters(wrapped)),
        StorageGroup("policy_gradients", lambda: _gradients(wrapped, optimizer), platform=platform, space=None),
        group("optimizer_masters", lambda: _masters(wrapped, optimizer)),
        group("optimizer_moments", lambda: _moments(optimizer)),
    )


def frozen_group(
    name: str, modules: Sequence[torch.nn.Module], *, platform: Platform, far_folder: Path
) -> StorageGroup:
    """Parameters and buffers of a model that is not trained."""
    return StorageGroup(
        name,
        lambda: _module_tensors(modules),
        platform=platform,
        space=make_far_space(platform, far_folder),
        contents="constant",
    )


def _module_tensors(modules: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, module in enumerate(modules):
        yield from ((f"{index}.{name}", parameter.data) for name, parameter in module.named_parameters())
        yield from ((f"{index}.{name}", buffer) for name, buffer in module.named_buffers())


def _flat_buffers(wrapped: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """megatron-core's parameter-and-gradient buffers, those of experts included."""
    for index, chunk in enumerate(wrapped):
        buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
        yield from ((f"{index}.buffer{position}", buffer) for position, buffer in enumerate(buffers))


def _parameters(wrapped: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    # The wrapper's own `buffers` hides torch's method of that name, so its module is asked.
    yield from _module_tensors([chunk.module for chunk in wrapped])
    for name, buffer in _flat_buffers(wrapped):
        if buffer.param_data is not None:
            yield f"{name}.param_data", buffer.param_data
        for bucket in buffer.buckets:
            if bucket.param_data is not None:
                yield f"{name}.bucket{bucket.bucket_id}.param_data", bucket.param_data


def _gradients(wrapped: Sequence[Any], optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in _flat_buffers(wrapped):
        yield f"{name}.grad_data", buffer.grad_data
        yield from ((f"{name}.bucket{bucket.bucket_id}.grad_data", bucket.grad_data) for bucket in buffer.buckets)
    for index, chunk in enumerate(wrapped):
        for name, parameter in chunk.module.named_parameters():
            if getattr(parameter, "main_grad", None) is not None:
                yield f"{index}.{name}.main_grad", parameter.main_grad
            if parameter.grad is not None:
                yield f"{index}.{name}.grad", parameter.grad
    for name, master in _optimizer_parameters(optimizer):
        if master.grad is not None:
            yield f"{name}.grad", master.grad


def _masters(wrapped: Sequence[Any], optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """fp32 copies; those that share their memory with a parameter belong to the policy's group."""
    policy = {tensor.untyped_storage()._cdata for _, tensor in _parameters(wrapped)}
    for name, master in _optimizer_parameters(optimizer):
        if master.untyped_storage()._cdata not in policy:
            yield name, master.data


def _moments(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in the optimizers' states, whatever its name: some optimizers keep masters there, too.

    Step counters have no dimension. They stay, for they are read when nobody thinks of phases.
    """
    for index, inner in enumerate(_inner_optimizers(optimizer)):
        for position, state in enumerate(inner.state.values()):
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    yield f"optimizer{index}.state{position}.{key}", value


def _optimizer_parameters(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for index, inner in enumerate(_inner_optimizers(optimizer)):
        for number, group in enumerate(inner.param_groups):
            for position, parameter in enumerate(group["params"]):
                yield f"optimizer{index}.group{number}.parameter{position}", parameter


def _inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if getattr(part, "optimizer", None) is not None]
