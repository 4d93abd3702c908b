"""The agreed walk: every HF tensor whole, on every rank of a replica, in one order. Export and publish share it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from grpo_megatron.families.base import ModelDescription, TensorRule
from grpo_megatron.families.describe import tensor_rules
from grpo_megatron.families.layout import ShardLayout, shard_layout
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
    """One rule, the pipeline stage whose parameter it takes, and what each tensor-parallel rank's shard consists of."""

    rule: TensorRule
    stage: int
    dtype: torch.dtype
    layouts: tuple[ShardLayout, ...]


class WeightWalk:
    """Whole HF tensors out of the sharded parameters. Making one is collective over the pipeline group.

    It goes piece by piece: the HF tensors of one parameter, such as query, key and value. Per piece the owning stage
    broadcasts its shards to the other stages, each along its own pipeline group; then every tensor-parallel group
    gathers them. So a rank receives each byte of the model once.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], description: ModelDescription, groups: Groups) -> None:
        self._description = description
        self._groups = groups
        self._parameters = parameters_by_name(chunks)
        self._device = next(iter(self._parameters.values())).device
        owned = gather_objects({name: value.dtype for name, value in self._parameters.items()}, groups.pipeline)
        self._steps = [self._step(rule, owned) for rule in tensor_rules(description) if not rule.is_copy]
        self.pieces: tuple[tuple[WalkEntry, ...], ...] = tuple(
            tuple(
                WalkEntry(name, shape, step.dtype)
                for name, shape in zip(step.rule.hf_names, step.rule.hf_shapes, strict=True)
            )
            for step in self._steps
        )
        self.entries: tuple[WalkEntry, ...] = tuple(entry for piece in self.pieces for entry in piece)
        self.peak_gathering_bytes = 0
        """The most that gathering one piece took beside the parameters and the targets, on this rank so far."""

    @property
    def device(self) -> torch.device:
        return self._device

    @torch.no_grad()
    def copy_piece(self, index: int, targets: Sequence[torch.Tensor | None] | None) -> None:
        """Copy the tensors of `pieces[index]` to where this rank wants them, whatever it owns.

        Collective over tensor and pipeline groups: every rank of a replica takes the same pieces in the same order;
        a rank with `targets` None only takes part. Tensors whose target is None are left out.
        """
        step = self._steps[index]
        shards = self._shards(step)
        if targets is not None:
            self._put_together(step, shards, targets)

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[WalkEntry, torch.Tensor]]:
        """Walk once; a tensor is to be used before the next is asked for. Collective over tensor and pipeline groups.

        Every rank must take equally many. Without sharding a tensor is the parameter itself: read it only.
        """
        entries = iter(self.entries)
        for step in self._steps:
            for tensor in self._whole(step):
                yield next(entries), tensor

    def _step(self, rule: TensorRule, owned: Sequence[Mapping[str, torch.dtype]]) -> _Step:
        stages = [stage for stage, names in enumerate(owned) if rule.megatron_name in names]
        assert len(stages) == 1, f"{rule.megatron_name} lies on stages {stages}, expected exactly one"
        size = self._groups.grid.tensor
        layouts = tuple(shard_layout(rule, self._description, rank=rank, size=size) for rank in range(size))
        return _Step(rule, stages[0], owned[stages[0]][rule.megatron_name], layouts)

    def _whole(self, step: _Step) -> list[torch.Tensor]:
        """The HF tensors of one rule."""
        shards = self._shards(step)
        if step.rule.combine == "copy" and (len(shards) == 1 or step.rule.shard_axis is None):
            return shards[:1]
        whole = [torch.empty(shape, dtype=step.dtype, device=self._device) for shape in step.rule.hf_shapes]
        self._put_together(step, shards, whole)
        return whole

    def _shards(self, step: _Step) -> list[torch.Tensor]:
        """Every tensor-parallel rank's shard, or only this rank's where they are all the same."""
        shard = self._shard(step)
        if len(step.layouts) == 1 or step.rule.shard_axis is None:
            return [shard]
        shards = [torch.empty_like(shard) for _ in step.layouts]
        received = 0 if step.stage == self._groups.stage else shard.nbytes
        self.peak_gathering_bytes = max(self.peak_gathering_bytes, received + len(shards) * shard.nbytes)
        dist.all_gather([_bytes(s) for s in shards], _bytes(shard), group=self._groups.tensor)
        return shards

    def _put_together(
        self, step: _Step, shards: Sequence[torch.Tensor], targets: Sequence[torch.Tensor | None]
    ) -> None:
        """Copy every segment of every shard to its place."""
        axis = step.rule.shard_axis or 0
        for layout, part in zip(step.layouts, shards, strict=False):  # one shard where they are all the same
            offset = 0
            for segment in layout.segments:
                target = targets[segment.source]
                if target is not None:
                    target.narrow(axis, segment.start, segment.size).copy_(part.narrow(axis, offset, segment.size))
                offset += segment.size

    def _shard(self, step: _Step) -> torch.Tensor:
        """The parameter of the owning stage on this rank's tensor coordinate."""
        shape = step.layouts[self._groups.tensor_rank].shape
        parameter = self._parameters.get(step.rule.megatron_name) if step.stage == self._groups.stage else None
        if parameter is not None:
            assert tuple(parameter.shape) == shape, (step.rule.megatron_name, tuple(parameter.shape), shape)
            shard = parameter.detach().contiguous()
        else:
            shard = torch.empty(shape, dtype=step.dtype, device=self._device)
            self.peak_gathering_bytes = max(self.peak_gathering_bytes, shard.nbytes)
        if self._groups.grid.pipeline > 1:
            dist.broadcast(_bytes(shard), group=self._groups.pipeline, group_src=step.stage)
        return shard


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: every backend sends every dtype that way."""
    return tensor.view(-1).view(torch.uint8)
