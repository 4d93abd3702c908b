"""From a checked configuration to an exit code: ranks meet, parts are built, the loop runs, everything is closed."""

import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from grpo_megatron.checkpoint.base import CheckpointError
from grpo_megatron.config.loader import LoadedConfig
from grpo_megatron.config.resolved import to_yaml
from grpo_megatron.parallel.grid import RankGrid
from grpo_megatron.parallel.groups import build_groups
from grpo_megatron.parallel.store import SharedStore
from grpo_megatron.platform.device import current_platform, use_deterministic_algorithms
from grpo_megatron.platform.environment import LaunchEnvironment
from grpo_megatron.platform.kernels import choose_kernels
from grpo_megatron.scheduler.build import Session, build_run, check_ranks_agree
from grpo_megatron.scheduler.loop import train
from grpo_megatron.scheduler.recovery import StopRun
from grpo_megatron.scheduler.signals import StopRequest
from grpo_megatron.scheduler.startup import StartError, Startup
from grpo_megatron.utils.logging import setup_logging

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
    logger = setup_logging(folder / "logs", rank=launch.rank)
    try:
        session = open_session(loaded, launch, folder, stop_request, logger)
        run = build_run(session)
    except (StartError, CheckpointError, ValueError) as error:
        logger.error("%s", error)
        return EXIT_REFUSED
    logger.info("start: ready after %.1f s, version %d", sum(session.startup.seconds.values()), run.progress.next_step)
    try:
        train(run)
        return EXIT_DONE
    except StopRun as stop:
        logger.warning("%s", stop)
        return stop.exit_code
    finally:
        run.close()
        dist.destroy_process_group()


def open_session(loaded, launch, folder, stop_request, logger) -> Session:  # noqa: ANN001
    """Ranks meet and agree, the run's folder is there."""
    config = loaded.config
    startup = Startup(logger.info)
    platform = current_platform(launch.local_rank)
    if config.run.deterministic:
        use_deterministic_algorithms()
    platform.seed_everything(config.run.seed)
    longest = max(config.run.phase_deadline_seconds, config.run.start_deadline_seconds) + COLLECTIVE_SLACK_SECONDS
    with startup.stage("process groups"):
        dist.init_process_group(platform.backend, timeout=timedelta(seconds=longest)) if launch.master_port else None
        parallel = config.parallel
        grid = RankGrid(launch.world_size, parallel.tensor, parallel.pipeline, parallel.context)
        alone = None if launch.master_port else dist.HashStore()
        groups = build_groups(grid, backend=platform.backend, timeout_seconds=longest, store=alone)
        shared = alone or dist.distributed_c10d._get_default_store()
    store = SharedStore(dist.PrefixStore("grpo_megatron", shared), rank=launch.rank, world_size=launch.world_size)
    session = Session(loaded, folder, platform, groups, store, logger, stop_request, startup)
    check_ranks_agree(session)
    if launch.rank == 0:
        (folder / "config.yaml").write_text(to_yaml(config))
        logger.info(
            "%d ranks: tensor %d, pipeline %d, data %d, on %s (%s); %s",
            *(grid.world_size, grid.tensor, grid.pipeline, grid.data),
            *(platform.kind, time.strftime("%Y-%m-%d %H:%M:%S"), choose_kernels().describe()),
        )
    return session
