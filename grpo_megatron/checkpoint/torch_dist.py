"""Writes and reads megatron-core's torch_dist format inside this process, so that it can neither hang nor half succeed.

megatron-core's own `save` forks writers from a process with live communicators, waits for them without a deadline,
and lets rank 0 fail alone while the others wait for it. Here the same plan, the same files and the same metadata are
written by threads of the rank itself, and the ranks agree on the outcome after every part that can fail. Whoever
reads torch_dist reads these files.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from grpo_megatron.checkpoint.base import CheckpointError, Coordination
from grpo_megatron.checkpoint.failures import explain_failure
from grpo_megatron.platform.checkpoint_writer import ASYNC_SAVE_ARGUMENTS, write_in_this_process

COMMON_NAME = "common.pt"
WRITERS_PER_RANK = 2
"""Threads and files per rank: serialising one tensor overlaps with writing another."""
_REASON_CHARACTERS = 400
"""Of a message that may list every tensor of the checkpoint."""


@dataclass(frozen=True)
class _Plan:
    writer: FileSystemWriterAsync
    metadata: Any
    """Of all ranks' tensors; only rank 0 has it."""


class _PlanningStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's planning, without its writing: keeps the plan for `save_sharded`."""

    plan: _Plan

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, *_: Any) -> AsyncRequest:
        self.plan = _Plan(writer, planned[1])
        return AsyncRequest(None, (), [])


def save_sharded(sharded_state: dict[str, Any], folder: Path, coordination: Coordination) -> None:
    """Write a sharded state dict into an empty folder that every rank sees. Collective over the world.

    Raises:
        CheckpointError: on every rank, if any rank could not write its part.
    """
    write_in_this_process()
    sharded, common = save_preprocess(sharded_state)
    on_rank_zero = coordination.rank == 0
    error = _attempt(lambda: _write_common(common, folder / COMMON_NAME), folder) if on_rank_zero else None
    coordination.agree(error, "saving the part that all ranks share")
    strategy = _PlanningStrategy("torch_dist", 1, thread_count=WRITERS_PER_RANK)
    strategy.async_save(sharded, folder, *ASYNC_SAVE_ARGUMENTS)
    plan = strategy.plan
    results: list[Any] = []
    error = _attempt(lambda: results.extend(_write_buckets(plan.writer)), folder)
    coordination.agree(error, "saving tensors")
    all_results = coordination.gather(results)

    def finish() -> None:
        plan.writer.finish(plan.metadata, all_results)
        save_config(CheckpointingConfig(strategy.backend, strategy.version), str(folder))

    error = _attempt(finish, folder) if on_rank_zero else None
    coordination.agree(error, "saving the index of the tensors")


def load_sharded(sharded_state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill a sharded state dict, whatever layout the files were written in. Collective over the world.

    Raises:
        CheckpointError: a tensor is missing or has another global shape; names it.
    """
    try:
        return dist_checkpointing.load(sharded_state, str(folder))
    except CheckpointException as error:  # a BaseException: what the ranks met, each under its number
        reasons = {str(cause)[:_REASON_CHARACTERS] for cause, _ in error.failures.values()}
        raise CheckpointError(f"{folder} does not fit this model: {'; '.join(sorted(reasons))}") from error
    except (OSError, RuntimeError, KeyError, ValueError, CheckpointingException) as error:
        raise CheckpointError(f"{folder} does not fit this model: {str(error)[:_REASON_CHARACTERS]}") from error


def has_part(folder: Path, name: str) -> bool:
    """Whether the state dict that was saved had this part at its top. Not collective."""
    return name in dist_checkpointing.load_common_state_dict(str(folder))


def _write_buckets(writer: FileSystemWriterAsync) -> list[Any]:
    """This rank's files, flushed to disk; where each tensor lies in them."""
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    buckets = FileSystemWriterAsync.preload_tensors(writer.write_buckets or [], non_blocking=True)

    def write(index: int) -> list[Any]:
        outcome: SimpleQueue = SimpleQueue()
        FileSystemWriterAsync.write_preloaded_data(
            transforms, index, buckets[index], outcome, _NothingToCount(), use_fsync=True
        )
        result = outcome.get()[1]
        if isinstance(result, BaseException):
            raise result
        return result

    if not buckets:
        return []
    with ThreadPoolExecutor(max_workers=len(buckets)) as pool:
        return [item for items in pool.map(write, range(len(buckets))) for item in items]


class _NothingToCount:
    """In place of the queue by which forked writers say that they are done: a thread's future says it."""

    def get(self) -> None: ...
    def task_done(self) -> None: ...


def _write_common(common: dict[str, Any], path: Path) -> None:
    # Through a stream of Python's: given a path, torch writes by itself and does not say why it failed.
    with path.open("wb") as stream:
        torch.save(common, stream)


def _attempt(action: Callable[[], Any], folder: Path) -> str | None:
    """Run what may fail on one rank alone; the reason as text, so that all ranks can agree on it."""
    try:
        action()
    except (OSError, RuntimeError) as error:
        return str(explain_failure(error, folder, "writing"))
    return None
