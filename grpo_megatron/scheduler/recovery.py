"""After every step: save if it is due, end if a signal or a health rule says so. And resume at the start."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from grpo_megatron.checkpoint.base import CheckpointError
from grpo_megatron.checkpoint.checkpointer import Checkpointer, LoadReport, Model, RunState
from grpo_megatron.checkpoint.manifest import Description
from grpo_megatron.config.schema import CheckpointSection, RunSection
from grpo_megatron.memory.manager import MemoryManager
from grpo_megatron.monitor.progress import Progress
from grpo_megatron.parallel.collectives import agree, gather_objects
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.scheduler.phases import CHECKPOINT_NEEDS
from grpo_megatron.scheduler.reporting import JudgedStep
from grpo_megatron.scheduler.saving import watch_saving
from grpo_megatron.scheduler.signals import StopRequest

EXIT_FAILED = 3
EXIT_STOPPED_BY_HEALTH = 4
EXIT_ENDED_ON_SIGNAL = 5


class StopRun(Exception):
    """The run ends before its last step, on all ranks alike."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


@dataclass
class RunProgress:
    """How far the run is. A `Stateful`."""

    next_step: int = 0
    """Steps done so far, over all starts: the policy version that is saved."""
    train_seconds: float = 0.0
    """Of those steps, without evaluations and checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {"next_step": self.next_step, "train_seconds": self.train_seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next_step = int(state["next_step"])
        self.train_seconds = float(state["train_seconds"])


class Recovery:
    """Owns when a version is saved, and what is done about a bad step."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        model: Model,
        state: RunState,
        progress: RunProgress,
        *,
        folder: Path,
        describe: Callable[[int], Description],
        section: CheckpointSection,
        num_steps: int,
        memory: MemoryManager,
        groups: Groups,
        stop_request: StopRequest,
        open_progress: Callable[[str, int], Progress],
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._checkpointer = checkpointer
        self._model = model
        self._state = state
        self._progress = progress
        self._folder = folder
        self._describe = describe
        self._section = section
        self._num_steps = num_steps
        self._memory = memory
        self._groups = groups
        self._stop_request = stop_request
        self._open_progress = open_progress
        self._say = say
        self._warn = warn
        self._saved_version: int | None = None

    def resume(self, section: RunSection) -> LoadReport | None:
        """Restore what `run.resume` asks for; None: this is a new run. Collective over the world.

        Raises:
            CheckpointError: on every rank; what was asked for is not there, or there is something and nothing was
                asked for.
        """
        if section.resume == "never":
            found, skipped = self._checkpointer.find()
            there = [found.path] if found is not None else [folder.path for folder in skipped]
            if there:
                raise CheckpointError(
                    f"run.resume: never, but {there[0]} is there; choose another run.name or set run.resume=auto"
                )
            return None
        version = None if section.resume == "auto" else section.resume
        report = self._checkpointer.load(version, self._model, self._state)
        if report is None:
            return None
        for skipped in report.skipped:
            self._warn(str(skipped))
        for line in changed_settings(report.checkpoint.manifest.description, self._describe(0)):
            self._warn(line)
        if report.checkpoint.version >= self._num_steps:
            self._say(
                f"run.steps: {self._num_steps}, and {report.checkpoint.version} are done: nothing is left to train"
            )
        self._checkpointer.set_aside_after(report.checkpoint.version)
        self._saved_version = report.checkpoint.version
        self._say(
            f"resumed from version {report.checkpoint.version} ({report.checkpoint.path}, {report.seconds:.1f} s); "
            f"random numbers of single ranks: {report.per_rank_state.per_rank}"
        )
        return report

    def judge(self, step: int, judged: JudgedStep) -> None:
        """Count the step, or end the run. Collective over the world.

        Raises:
            StopRun: on every rank, by a health rule. Nothing is saved: the version is bad.
            RankFailure: on every rank, if the account of the step could not be written.
        """
        agree(judged.ledger_error, self._groups.world, "writing the ledger")
        self._progress.next_step = step + 1
        self._progress.train_seconds += judged.report.seconds
        if judged.verdict == "stop":
            saved = "nothing is saved" if self._saved_version is None else f"version {self._saved_version} is saved"
            raise StopRun(f"step {step + 1}: a health rule stopped the run; {saved}", EXIT_STOPPED_BY_HEALTH)

    def settle(self, step: int) -> None:
        """Save if it is due, and end if a signal asks for it. Collective over the world.

        Raises:
            StopRun: on every rank, after a signal; its exit code says whether everything is saved.
            CheckpointError: on every rank, if a save failed and `checkpoint.on_failure` is `stop`.
        """
        version = step + 1
        signal_name = self._stop_request.agreed(self._groups)
        every = self._section.every_steps
        if signal_name is not None or version == self._num_steps or (every > 0 and version % every == 0):
            self._save(version)
        if signal_name is None or version == self._num_steps:
            return
        ended = f"{signal_name}: ended after step {version} of {self._num_steps}"
        if self._saved_version == version:
            raise StopRun(f"{ended}; version {version} is saved, start again to go on", EXIT_ENDED_ON_SIGNAL)
        lost = "nothing is" if self._saved_version is None else f"version {self._saved_version} is the last that is"
        raise StopRun(f"{ended}, which could not be saved; {lost} saved", EXIT_FAILED)

    def _save(self, version: int) -> None:
        if self._saved_version == version:
            return
        begin = time.monotonic()
        self._memory.require("checkpoint", CHECKPOINT_NEEDS)
        num_bytes = sum(gather_objects(self._model.num_bytes(), self._groups.world))
        show = partial(self._open_progress, f"saving version {version}")
        watched = watch_saving(self._folder, num_bytes=num_bytes, open_progress=show)
        try:
            # One rank looks at the files; on a shared file system every look of the others would be a waste.
            with watched if self._groups.rank == 0 else nullcontext():
                report = self._checkpointer.save(version, self._model, self._state, self._describe(version))
        except CheckpointError as error:
            if self._section.on_failure == "stop":
                raise
            self._warn(f"version {version} was not saved, training goes on (checkpoint.on_failure: continue): {error}")
            return
        self._saved_version = version
        self._say(
            f"saved version {version}: {report.num_bytes / 1e6:.0f} MB in {time.monotonic() - begin:.1f} s "
            f"({report.checkpoint.path})"
        )


def changed_settings(saved: Description, current: Description) -> list[str]:
    """One line per key of the configuration that a resumed run has otherwise than the checkpoint."""
    before, now = (dict(_flat(yaml.safe_load(each.configuration))) for each in (saved, current))
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    return [
        f"resumed with another setting, {key}: the checkpoint was made with {before.get(key)!r}, now {now.get(key)!r}"
        + ("; the weights are the checkpoint's" if key == "model.policy" else "")
        for key in changed
    ]


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
