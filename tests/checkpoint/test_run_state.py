import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_megatron.checkpoint.base import CheckpointError
from grpo_megatron.checkpoint.random_state import RandomState
from grpo_megatron.checkpoint.run_state import RestoredState, load_run_state, save_run_state

pytestmark = pytest.mark.unit


class Counter:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.state}

    def load_state_dict(self, state: Any) -> None:
        self.state = state["value"]


def test_every_owner_gets_its_own_state_back(tmp_path: Path) -> None:
    saved = {"step": 3, "ids": ["a", "b"], "order": torch.tensor([2, 0, 1]), "done": True, "best": None, "x": (1, 2.5)}
    for rank in (0, 1):
        save_run_state(tmp_path, shared={"sampler": Counter(saved)}, per_rank={"random": Counter(rank)}, rank=rank)
    sampler, generator = Counter(None), Counter(None)
    restored = load_run_state(
        tmp_path, shared={"sampler": sampler}, per_rank={"random": generator}, rank=1, world_size=2
    )
    assert restored == RestoredState("restored")
    assert generator.state == 1
    assert torch.equal(sampler.state.pop("order"), saved.pop("order"))
    assert sampler.state == saved


def test_another_number_of_ranks_keeps_what_is_shared_and_says_that_the_rest_was_left(tmp_path: Path) -> None:
    for rank in (0, 1):
        save_run_state(tmp_path, shared={"sampler": Counter(5)}, per_rank={"random": Counter(rank)}, rank=rank)
    sampler, generator = Counter(None), Counter("untouched")
    restored = load_run_state(
        tmp_path, shared={"sampler": sampler}, per_rank={"random": generator}, rank=0, world_size=1
    )
    assert restored == RestoredState("other_world_size")
    assert (sampler.state, generator.state) == (5, "untouched")


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (np.float64(1.0), r"sampler\.value: float64 is not plain"),
        ({"ids": [1, {2}]}, r"sampler\.value\.ids\[1\]: set is not plain"),
        ({("a", 1): 2}, r"sampler\.value: key \('a', 1\) must be a string"),
    ],
    ids=["numpy scalar", "set in a list", "tuple as key"],
)
def test_what_could_not_be_read_back_safely_is_refused_when_it_is_saved(tmp_path: Path, value, where: str) -> None:  # noqa: ANN001
    with pytest.raises(ValueError, match=where):
        save_run_state(tmp_path, shared={"sampler": Counter(value)}, per_rank={}, rank=0)


def test_a_file_that_holds_code_is_not_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (Path.touch, (tmp_path / "executed",))

    torch.save({"sampler": Bomb()}, tmp_path / "shared.pt")
    with pytest.raises(CheckpointError, match="shared.pt cannot be read"):
        load_run_state(tmp_path, shared={"sampler": Counter(0)}, per_rank={}, rank=0, world_size=0)
    assert not (tmp_path / "executed").exists()


def test_parts_that_do_not_match_are_named_on_both_sides(tmp_path: Path) -> None:
    save_run_state(tmp_path, shared={"sampler": Counter(1), "alerts": Counter(1)}, per_rank={}, rank=0)
    with pytest.raises(CheckpointError, match="not in it: ledger; not in this run: alerts"):
        load_run_state(
            tmp_path, shared={"sampler": Counter(0), "ledger": Counter(0)}, per_rank={}, rank=0, world_size=1
        )


def test_random_numbers_go_on_where_they_were(single_rank_groups, tmp_path: Path) -> None:  # noqa: ANN001
    from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    def draw() -> list[float]:
        with get_cuda_rng_tracker().fork():
            tensor_parallel = torch.rand(()).item()
        return [random.random(), random.gauss(0, 1), np.random.normal(), torch.rand(()).item(), tensor_parallel]

    model_parallel_cuda_manual_seed(5)
    draw()
    save_run_state(tmp_path, shared={}, per_rank={"random": RandomState()}, rank=0)
    expected = [draw(), draw()]
    model_parallel_cuda_manual_seed(6)
    draw()
    load_run_state(tmp_path, shared={}, per_rank={"random": RandomState()}, rank=0, world_size=1)
    assert [draw(), draw()] == expected
