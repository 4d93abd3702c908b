"""The process groups of a run, made once by megatron-core's parallel_state and handed on as a record."""

import gc
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state

from grpo_megatron.parallel.grid import RankGrid


@dataclass(frozen=True)
class Groups:
    """Where this rank sits and whom it talks to. Every group can carry CPU tensors and objects over gloo."""

    rank: int
    grid: RankGrid
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    model: dist.ProcessGroup
    """tensor x pipeline: the ranks of one replica (and one context slice)."""
    world: dist.ProcessGroup

    @property
    def world_size(self) -> int:
        return self.grid.world_size

    @property
    def replica(self) -> int:
        return self.grid.coordinates(self.rank).data

    @property
    def num_replicas(self) -> int:
        return self.grid.data

    @property
    def tensor_rank(self) -> int:
        return self.grid.coordinates(self.rank).tensor

    @property
    def stage(self) -> int:
        return self.grid.coordinates(self.rank).pipeline

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.grid.pipeline - 1

    @property
    def model_leader(self) -> int:
        """First rank of this rank's replica: it admits requests and collects rewards."""
        return self.grid.replica_ranks(self.replica)[0]

    @property
    def is_model_leader(self) -> bool:
        return self.rank == self.model_leader


def build_groups(grid: RankGrid, *, backend: str, timeout_seconds: float, store: dist.Store | None = None) -> Groups:
    """Start torch.distributed if it is not there, and (re)build all groups for this grid. Collective over the world."""
    if not dist.is_initialized():
        options = {} if store is None else {"store": store, "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds), **options)
    if parallel_state.model_parallel_is_initialized():
        _destroy_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=grid.tensor,
        pipeline_model_parallel_size=grid.pipeline,
        context_parallel_size=grid.context,
        distributed_timeout_minutes=max(1, round(timeout_seconds / 60)),
    )
    world = dist.group.WORLD
    assert world is not None
    return Groups(
        rank=dist.get_rank(),
        grid=grid,
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        model=parallel_state.get_model_parallel_group(),
        world=world,
    )


def _destroy_groups() -> None:
    """Forget megatron-core's groups and end them. Every rank must come here.

    megatron-core only forgets them. Each gloo group keeps threads that wake up a hundred times a second, so ranks that
    rebuild their groups a few times would spend their cores on that.
    """
    parallel_state.destroy_model_parallel()
    world = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)
    gc.collect()


def split_world(size: int) -> dist.ProcessGroup:
    """This rank's group of `size` neighbours, for CPU tensors and objects. Collective over the world."""
    own = None
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, backend="gloo")
        own = group if dist.get_rank() in ranks else own
    assert own is not None, f"{dist.get_world_size()} ranks are no multiple of {size}"
    return own
