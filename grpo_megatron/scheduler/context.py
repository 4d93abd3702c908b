"""What is there before the parts of a run: the ranks, the machine, where to write."""

from dataclasses import dataclass
from logging import Logger
from pathlib import Path

from grpo_megatron.config.loader import LoadedConfig
from grpo_megatron.config.schema import Config
from grpo_megatron.monitor.progress import Progress, open_progress
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.parallel.store import SharedStore
from grpo_megatron.platform.device import Platform
from grpo_megatron.platform.environment import LaunchEnvironment
from grpo_megatron.scheduler.signals import StopRequest
from grpo_megatron.scheduler.startup import Startup


@dataclass(frozen=True)
class Session:
    """One rank of a run that has met the others."""

    loaded: LoadedConfig
    launch: LaunchEnvironment
    folder: Path
    platform: Platform
    groups: Groups
    store: SharedStore
    logger: Logger
    stop_request: StopRequest
    startup: Startup

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def is_first_rank(self) -> bool:
        return self.groups.rank == 0

    def open_progress(self, description: str, total: int, unit: str = "answers") -> Progress:
        """A bar or lines on rank 0, nothing elsewhere."""
        kind = "auto" if self.is_first_rank else "silent"
        return open_progress(description, total=total, unit=unit, kind=kind, say=self.logger.info)
