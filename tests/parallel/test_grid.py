"""The rank grid against megatron-core's own order, worked out by hand."""

import pytest

from grpo_megatron.parallel.grid import Coordinates, RankGrid

pytestmark = pytest.mark.unit


def test_tensor_varies_fastest_then_data_then_pipeline() -> None:
    grid = RankGrid(world_size=8, tensor=2, pipeline=2)
    assert [(c.tensor, c.data, c.pipeline) for c in map(grid.coordinates, range(8))] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1),
    ]  # fmt: skip


def test_rank_and_coordinates_are_inverse() -> None:
    grid = RankGrid(world_size=24, tensor=2, pipeline=3, context=2)
    assert [grid.rank_at(grid.coordinates(rank)) for rank in range(24)] == list(range(24))
    assert grid.rank_at(Coordinates(tensor=1, context=1, data=1, pipeline=2)) == 23


def test_a_replica_spans_all_stages() -> None:
    assert RankGrid(world_size=8, tensor=2, pipeline=2).replica_ranks(1) == (2, 3, 6, 7)


def test_ranks_that_do_not_divide_are_refused_with_the_number_that_would() -> None:
    with pytest.raises(ValueError, match=r"6 ranks are not divisible .* = 4; start a multiple of 4 ranks"):
        RankGrid(world_size=6, tensor=2, pipeline=2)
