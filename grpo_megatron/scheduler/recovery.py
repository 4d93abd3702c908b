"""After every step: save if it is due, end if a signal or a health rule says so; and resume at the start."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.checkpoint.base import CheckpointError, Coordination, Stateful
from grpo_megatron.config.schema import CheckpointSection


class StopRun(Exception):
    """The run ends before its last step, on all ranks alike."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass
class Progress:
    """How far the run is. A `Stateful`."""

    next_step: int = 0
    train_seconds: float = 0.0
    """Of all steps so far, over all starts of this run, without evaluations and checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {"next_step": self.next_step, "train_seconds": self.train_seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next_step = state["next_step"]
        self.train_seconds = state["train_seconds"]
