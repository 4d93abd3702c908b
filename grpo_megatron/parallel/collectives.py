"""Collectives on CPU objects. Every rank of the group must reach every call."""

from typing import TypeVar

import torch
import torch.distributed as dist

from grpo_megatron.parallel.errors import RankFailure

Value = TypeVar("Value")


def gather_objects(value: Value, group: dist.ProcessGroup) -> list[Value]:
    """Every rank's value in the order of the group's ranks, on every rank. Collective over `group`."""
    values: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: Value | None, source_rank: int, group: dist.ProcessGroup) -> Value:
    """The value of the rank with this global number, on every rank. Collective over `group`."""
    box = [value]
    dist.broadcast_object_list(box, src=source_rank, group=group, device=torch.device("cpu"))
    return box[0]  # type: ignore[return-value]


def agree(error: str | None, group: dist.ProcessGroup, what: str) -> None:
    """Go on only if no rank of the group has an error. Collective over `group`.

    Raises:
        RankFailure: on every rank of the group, if any rank passed an error.
    """
    errors = gather_objects((dist.get_rank(), error), group)
    failed = [f"rank {rank}: {text}" for rank, text in errors if text is not None]
    if failed:
        raise RankFailure(f"{what} failed on {len(failed)} of {len(errors)} ranks\n" + "\n".join(failed))
