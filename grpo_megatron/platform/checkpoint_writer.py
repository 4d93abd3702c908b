"""How megatron-core's checkpoint writer is kept inside this process. Applied on every machine before a save."""

import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async

from grpo_megatron.platform.compatibility import MEGATRON_CORE_VERSION

ASYNC_SAVE_ARGUMENTS: tuple[str, ...] = ("mcore",) if MEGATRON_CORE_VERSION >= (0, 17) else ()
"""Newer versions ask which asynchronous writer to plan for; the other one needs a library of its own."""


def write_in_this_process() -> None:
    """Give the writer a queue of this process.

    By itself it starts a manager process on every rank for this queue. That process imports the main module anew,
    inherits the environment of a rank, and outlives a rank that is killed.
    """
    filesystem_async._results_queue = queue.Queue()
