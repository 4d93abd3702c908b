"""The agreed walk: every HF tensor whole, on every rank of a replica, in one order. Export and publish share it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from grpo_megatron.families.base import ModelDescription, TensorRule
from grpo_megatron.families.describe import tensor_rules
from grpo_megatron.families.layout import shard_layout
from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.weights.naming import parameters_by_name


@dataclass(frozen=True)
class WalkEntry:
    """One HF tensor of the walk; the list of them is the same on every rank.

    Example:
        >>> WalkEntry("model.norm.weight", (64,), torch.bfloat16).num_bytes
        128
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Step:
    """One rule and the pipeline stage whose parameter it takes."""

    rule: TensorRule
    stage: int
    dtype: torch.dtype


class WeightWalk:
    """Whole HF tensors out of the sharded parameters. Making one is collective over the pipeline group.

    Per rule: the owning stage broadcasts its shards to the other stages, each along its own pipeline group; then every
    tensor-parallel group gathers them. So a rank receives each byte of the model once.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], description: ModelDescription, groups: Groups) -> None:
        self._description = description
        self._groups = groups
        self._parameters = parameters_by_name(chunks)
        self._device = next(iter(self._parameters.values())).device
        owned = gather_objects({name: value.dtype for name, value in self._parameters.items()}, groups.pipeline)
        self._steps = [_find_owner(rule, owned) for rule in tensor_rules(description) if not rule.is_copy]
        self.entries: tuple[WalkEntry, ...] = tuple(
            WalkEntry(name, shape, step.dtype)
            for step in self._steps
            for name, shape in zip(step.rule.hf_names, step.rule.hf_shapes, strict=True)
        )

    @property
    def device(self) -> torch.device:
        return self._device

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[WalkEntry, torch.Tensor]]:
        """Walk once; a tensor is to be used before the next is asked for. Collective over tensor and pipeline groups.

        Every rank must take equally many. Without sharding a tensor is the parameter itself: read it only.
        """
        entries = iter(self.entries)
        for step in self._steps:
            for tensor in self._whole(step):
                yield next(entries), tensor

    def _whole(self, step: _Step) -> list[torch.Tensor]:
        """The HF tensors of one rule."""
        rule, size = step.rule, self._groups.grid.tensor
        layouts = [shard_layout(rule, self._description, rank=rank, size=size) for rank in range(size)]
        shard = self._shard(step, layouts[self._groups.tensor_rank].shape)
        if rule.combine == "copy" and (size == 1 or rule.shard_axis is None):
            return [shard]
        shards = [shard]
        if size > 1:
            shards = [torch.empty_like(shard) for _ in range(size)]
            dist.all_gather([_bytes(s) for s in shards], _bytes(shard), group=self._groups.tensor)
        whole = [torch.empty(shape, dtype=step.dtype, device=self._device) for shape in rule.hf_shapes]
        axis = rule.shard_axis or 0
        for layout, part in zip(layouts, shards, strict=True):
            offset = 0
            for segment in layout.segments:
                target = whole[segment.source].narrow(axis, segment.start, segment.size)
                target.copy_(part.narrow(axis, offset, segment.size))
                offset += segment.size
        return whole

    def _shard(self, step: _Step, shape: tuple[int, ...]) -> torch.Tensor:
        """The parameter of the owning stage on this rank's tensor coordinate."""
        parameter = self._parameters.get(step.rule.megatron_name) if step.stage == self._groups.stage else None
        if parameter is not None:
            assert tuple(parameter.shape) == shape, (step.rule.megatron_name, tuple(parameter.shape), shape)
            shard = parameter.detach().contiguous()
        else:
            shard = torch.empty(shape, dtype=step.dtype, device=self._device)
        if self._groups.grid.pipeline > 1:
            dist.broadcast(_bytes(shard), group=self._groups.pipeline, group_src=step.stage)
        return shard


def _find_owner(rule: TensorRule, owned: list[dict[str, torch.dtype]]) -> _Step:
    stages = [stage for stage, names in enumerate(owned) if rule.megatron_name in names]
    assert len(stages) == 1, f"{rule.megatron_name} lies on stages {stages}, expected exactly one"
    return _Step(rule, stages[0], owned[stages[0]][rule.megatron_name])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: every backend sends every dtype that way."""
    return tensor.view(-1).view(torch.uint8)
