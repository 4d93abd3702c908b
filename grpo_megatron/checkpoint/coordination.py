"""Saving and loading on all ranks of a run: `Coordination` over the world's process group."""

from typing import TypeVar

from grpo_megatron.checkpoint.base import CheckpointError
from grpo_megatron.parallel.collectives import agree, broadcast_object, gather_objects
from grpo_megatron.parallel.errors import RankFailure
from grpo_megatron.parallel.groups import Groups

Value = TypeVar("Value")


class WorldCoordination:
    """CPU objects over gloo; the group's time-out is the deadline of every wait."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.rank = groups.rank
        self.world_size = groups.world_size

    def from_rank_zero(self, value: Value | None) -> Value:
        return broadcast_object(value, 0, self._groups.world)

    def gather(self, value: Value) -> list[Value]:
        return gather_objects(value, self._groups.world)

    def agree(self, error: str | None, what: str) -> None:
        try:
            agree(error, self._groups.world, what)
        except RankFailure as failure:
            raise CheckpointError(str(failure)) from failure
