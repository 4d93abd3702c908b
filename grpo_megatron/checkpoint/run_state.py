"""Everything but the model that a resumed run must remember: sampler, alerts, step, evaluations, random numbers.

`shared.pt` holds what is the same on all ranks and is written by rank 0; `rank-3.pt` what belongs to rank 3. Files
hold plain data only and are read without unpickling code.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from grpo_megatron.checkpoint.base import CheckpointError, Stateful
from grpo_megatron.checkpoint.failures import explain_failure, explain_os_error

SHARED_NAME = "shared.pt"
_PLAIN = {bool, int, float, str, bytes, type(None)}


@dataclass(frozen=True)
class RestoredState:
    per_rank: Literal["restored", "other_world_size"]
    """`other_world_size`: the checkpoint was made by another number of ranks, so what belongs to single ranks (random
    numbers) could not be given back and is as it was before the call."""


def save_run_state(
    folder: Path, *, shared: Mapping[str, Stateful], per_rank: Mapping[str, Stateful], rank: int
) -> None:
    """Write this rank's part into an existing folder. Not collective.

    Raises:
        ValueError: an owner's state holds something that could not be read back; names where.
        CheckpointError: the disk is full or cannot be written.
    """
    if rank == 0:
        _write(folder / SHARED_NAME, {name: owner.state_dict() for name, owner in shared.items()})
    _write(folder / _rank_name(rank), {name: owner.state_dict() for name, owner in per_rank.items()})


def load_run_state(
    folder: Path, *, shared: Mapping[str, Stateful], per_rank: Mapping[str, Stateful], rank: int, world_size: int
) -> RestoredState:
    """Give every owner its state back. Not collective.

    Raises:
        CheckpointError: the owners of the checkpoint are not those of this run; names both sides.
    """
    _restore(folder / SHARED_NAME, shared)
    saved_ranks = len(list(folder.glob("rank-*.pt")))
    if saved_ranks != world_size:
        return RestoredState("other_world_size")
    _restore(folder / _rank_name(rank), per_rank)
    return RestoredState("restored")


def _restore(path: Path, owners: Mapping[str, Stateful]) -> None:
    try:
        states = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise explain_os_error(error, path, "loading the run's state") from error
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    missing, unexpected = sorted(set(owners) - set(states)), sorted(set(states) - set(owners))
    if missing or unexpected:
        raise CheckpointError(
            f"{path} was saved by a run with other parts: not in it: {', '.join(missing) or 'nothing'}; "
            f"not in this run: {', '.join(unexpected) or 'nothing'}"
        )
    for name, owner in owners.items():
        owner.load_state_dict(states[name])


def _write(path: Path, states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        _check_plain(state, name)
    try:
        with path.open("wb") as stream:
            torch.save(dict(states), stream)
    except (OSError, RuntimeError) as error:
        raise explain_failure(error, path, "saving the run's state") from error


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str | int):
                raise ValueError(f"state {where}: key {key!r} must be a string or an integer")
            _check_plain(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif type(value) not in _PLAIN and not isinstance(value, torch.Tensor):  # numpy's float64 is a float: exact type
        raise ValueError(f"state {where}: {type(value).__name__} is not plain data; see Stateful.state_dict")


def _rank_name(rank: int) -> str:
    return f"rank-{rank}.pt"
