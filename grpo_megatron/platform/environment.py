"""The only place where environment variables are read: what the launcher tells a rank about itself."""

import ctypes
import os
import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchEnvironment:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str
    master_port: int


LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHER_PREFIXES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "PET_",
    "TORCH_NCCL_",
)
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "no_proxy")


def read_launch_environment() -> LaunchEnvironment:
    """What torchrun set. Without torchrun: one rank.

    Raises:
        ValueError: some of torchrun's variables are set and others are not.
    """
    present = [name for name in LAUNCHER_VARIABLES if name in os.environ]
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return LaunchEnvironment(0, 1, 0, 1, "127.0.0.1", 0)
    missing = sorted(set(LAUNCHER_VARIABLES) - set(present))
    if missing:
        raise ValueError(f"launcher: {', '.join(missing)} not set; start with torchrun, which sets them all")
    return LaunchEnvironment(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        master_address=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
    )


def clean_child_environment() -> dict[str, str]:
    """This process's environment for a child that must not take itself for a rank, and must not use a proxy."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_PREFIXES) and name.lower() not in _PROXIES
    }


def end_with_launcher() -> None:
    """Have the kernel send SIGTERM to this rank when the process that started it dies, however it dies."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGTERM, 0, 0, 0)


def end_early_on_signals(exit_code: int) -> None:
    """Until the run takes signals over there is nothing to save: SIGINT and SIGTERM end the process with this code."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(exit_code)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
