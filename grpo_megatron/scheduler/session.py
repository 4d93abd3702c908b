"""From a checked configuration to an exit code: ranks meet, parts are built, the loop runs, everything is closed."""

import sys
import time
from datetime import timedelta
from logging import Logger
from pathlib import Path

import torch.distributed as dist

from grpo_megatron.checkpoint.base import CheckpointError
from grpo_megatron.config.loader import LoadedConfig
from grpo_megatron.config.resolved import to_yaml
from grpo_megatron.config.schema import Config
from grpo_megatron.parallel.collectives import broadcast_object
from grpo_megatron.parallel.errors import RankFailure
from grpo_megatron.parallel.grid import RankGrid
from grpo_megatron.parallel.groups import Groups, build_groups
from grpo_megatron.parallel.store import STACKS_SIGNAL, SharedStore
from grpo_megatron.platform.device import Platform, current_platform, use_deterministic_algorithms
from grpo_megatron.platform.environment import LaunchEnvironment
from grpo_megatron.platform.kernels import choose_kernels
from grpo_megatron.scheduler.build import build_run, check_ranks_agree
from grpo_megatron.scheduler.context import Session
from grpo_megatron.scheduler.loop import train
from grpo_megatron.scheduler.recovery import EXIT_FAILED, StopRun
from grpo_megatron.scheduler.signals import StopRequest
from grpo_megatron.scheduler.startup import StartError, Startup
from grpo_megatron.utils.logging import dump_stacks_on, setup_logging

EXIT_DONE = 0
EXIT_REFUSED = 1
COLLECTIVE_SLACK_SECONDS = 120.0
"""A collective must outlast the deadline of the phase it is in, so that the deadline speaks first."""


def run_session(loaded: LoadedConfig, launch: LaunchEnvironment) -> int:
    """Run on this rank; returns the exit code. Collective over the world."""
    config = loaded.config
    assert config.run.name is not None, "the loader fills it in"
    folder = Path(config.run.folder) / config.run.name
    stop_request = StopRequest()
    was_initialized = dist.is_initialized()
    try:
        logger = setup_logging(folder / "logs", rank=launch.rank)
        stacks = dump_stacks_on(STACKS_SIGNAL, folder / "logs", rank=launch.rank)
    except OSError as error:
        print(f"run.folder: {folder} cannot be written: {error.strerror}; choose another run.folder", file=sys.stderr)
        return EXIT_REFUSED
    try:
        session = open_session(loaded, launch, folder, stop_request, logger)
        run = build_run(session)
        with session.startup.stage("configuration file"):  # only now: the folder's lock is ours
            if launch.rank == 0:
                temporary = folder / "config.yaml.tmp"
                temporary.write_text(to_yaml(config))
                temporary.replace(folder / "config.yaml")
    except (StartError, CheckpointError) as error:
        if launch.rank == 0:
            logger.error("%s", error)
        return EXIT_REFUSED
    logger.info("start: ready after %.1f s, version %d", sum(session.startup.seconds.values()), run.progress.next_step)
    try:
        train(run)
        return EXIT_DONE
    except StopRun as stop:
        logger.warning("%s", stop)
        return stop.exit_code
    except (CheckpointError, RankFailure, TimeoutError, ValueError, ArithmeticError) as error:
        logger.error("%s", " ".join([str(error), *getattr(error, "__notes__", [])]))
        logger.info("where it happened", exc_info=True, extra={"file_only": True})
        return EXIT_FAILED
    finally:
        run.close()
        stacks.flush()
        if not was_initialized:
            dist.destroy_process_group()


def open_session(
    loaded: LoadedConfig, launch: LaunchEnvironment, folder: Path, stop_request: StopRequest, logger: Logger
) -> Session:
    """Ranks meet and agree. Collective over the world.

    Raises:
        StartError: the ranks do not meet, or were started with different configurations.
    """
    config = loaded.config
    startup = Startup(logger.info)
    platform = current_platform(launch.local_rank)
    if config.run.deterministic:
        use_deterministic_algorithms()
    platform.seed_everything(config.run.seed)
    with startup.stage("process groups"):
        groups, store = _meet(config, launch, platform)
    startup.groups = groups
    session = Session(loaded, launch, folder, platform, groups, store, logger, stop_request, startup)
    with startup.stage("configuration"):
        check_ranks_agree(session)
    grid = groups.grid
    logger.info(
        "%d ranks: tensor %d, pipeline %d, data %d, on %s; %s",
        *(grid.world_size, grid.tensor, grid.pipeline, grid.data),
        *(platform.kind, choose_kernels().describe()),
    )
    return session


def _meet(config: Config, launch: LaunchEnvironment, platform: Platform) -> tuple[Groups, SharedStore]:
    """Process groups and store; a single rank without torchrun has a store of its own."""
    seconds = max(config.run.phase_deadline_seconds, config.run.start_deadline_seconds) + COLLECTIVE_SLACK_SECONDS
    alone = None
    if not dist.is_initialized():
        if launch.master_port:
            dist.init_process_group(platform.backend, timeout=timedelta(seconds=seconds))
        else:
            alone = dist.HashStore()
    parallel = config.parallel
    grid = RankGrid(launch.world_size, parallel.tensor, parallel.pipeline, parallel.context)
    groups = build_groups(grid, backend=platform.backend, timeout_seconds=seconds, store=alone)
    # A prefix of its own: counters of an earlier session in the same processes must not count.
    session_name = broadcast_object(f"session-{time.time_ns()}", 0, groups.world)
    shared = dist.PrefixStore(session_name, alone or dist.distributed_c10d._get_default_store())
    return groups, SharedStore(shared, rank=launch.rank, world_size=launch.world_size)
