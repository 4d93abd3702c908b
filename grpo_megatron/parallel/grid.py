"""The rank grid as integers: who sits where, without torch and without a process group."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class RankGrid:
    """megatron-core's order: tensor varies fastest, then context, data, pipeline.

    Example:
        >>> grid = RankGrid(world_size=8, tensor=2, pipeline=2)
        >>> grid.data, grid.coordinates(5)
        (2, Coordinates(tensor=1, context=0, data=0, pipeline=1))
    """

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.model_size:
            raise ValueError(
                f"parallel: {self.world_size} ranks are not divisible by tensor {self.tensor} x pipeline "
                f"{self.pipeline} x context {self.context} = {self.model_size}; "
                f"start a multiple of {self.model_size} ranks"
            )

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the policy together."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Number of replicas."""
        return self.world_size // self.model_size

    def coordinates(self, rank: int) -> Coordinates:
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(tensor, context, data, pipeline)

    def rank_at(self, coordinates: Coordinates) -> int:
        outer = coordinates.pipeline * self.data + coordinates.data
        return (outer * self.context + coordinates.context) * self.tensor + coordinates.tensor

    def replica_ranks(self, data: int) -> tuple[int, ...]:
        """All ranks of one replica, ascending."""
        return tuple(rank for rank in range(self.world_size) if self.coordinates(rank).data == data)
