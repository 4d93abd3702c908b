"""Where reports go: console, `metrics.jsonl`, TensorBoard, `rollouts/`. A sink may fail; the run goes on without it.

Sinks live on rank 0 only; reports are already reduced.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from grpo_megatron.batch import ScoredRollout
from grpo_megatron.monitor import history, records
from grpo_megatron.monitor.console import evaluation_text, step_text
from grpo_megatron.monitor.records import Alert, EvaluationReport, StepReport

NUM_STEPS_FOR_REMAINING_TIME = 10


class Sink:
    """One place that reports go to; each kind overrides what it shows. Every method may raise."""

    name = "sink"

    def step(self, report: StepReport) -> None:
        """One step is done."""

    def evaluation(self, report: EvaluationReport) -> None:
        """Held-out problems were answered."""

    def alert(self, alert: Alert) -> None:
        """A rule found something."""

    def rollouts(self, step: int, rollouts: Sequence[ScoredRollout], advantages: Sequence[float | None]) -> None:
        """The step's rollouts with the advantage of each, in the same order."""

    def close(self) -> None:
        """Nothing more will come."""


class SinkSet:
    """Hands everything to every sink. One that raises is switched off, with one warning that names it."""

    def __init__(self, sinks: Sequence[Sink], *, warn: Callable[[str], None]) -> None:
        self._sinks = list(sinks)
        self._warn = warn
        self.failures: dict[str, str] = {}
        """Name of what was switched off -> its error; belongs into the run report."""

    @classmethod
    def opened(cls, makers: Mapping[str, Callable[[], Sink]], *, warn: Callable[[str], None]) -> "SinkSet":
        """Make each sink; one that cannot be made is left out, with a warning like one that fails later."""
        sinks = cls([], warn=warn)
        for name, make in makers.items():
            sinks.attempt(name, "the start of the run", partial(sinks._add, make))
        return sinks

    def step(self, report: StepReport) -> None:
        self._each(f"step {report.step}", lambda sink: sink.step(report))

    def evaluation(self, report: EvaluationReport) -> None:
        self._each(f"the evaluation of step {report.step}", lambda sink: sink.evaluation(report))

    def alert(self, alert: Alert) -> None:
        self._each(f"an alert of step {alert.step}", lambda sink: sink.alert(alert))

    def rollouts(self, step: int, rollouts: Sequence[ScoredRollout], advantages: Sequence[float | None]) -> None:
        self._each(f"the rollouts of step {step}", lambda sink: sink.rollouts(step, rollouts, advantages))

    def close(self) -> None:
        self._each("the end of the run", lambda sink: sink.close())
        self._sinks = []

    def attempt(self, name: str, what: str, action: Callable[[], object]) -> bool:
        """Do something of monitoring's that may fail, such as drawing plots; return whether it went well."""
        try:
            action()
        except Exception as error:  # whatever a disk or a library comes up with, training goes on
            self.failures[name] = f"{type(error).__name__}: {error}"
            self._warn(
                f"{name} could not take {what} and is switched off for the rest of the run "
                f"({self.failures[name]}); training goes on"
            )
            return False
        return True

    def _add(self, make: Callable[[], Sink]) -> None:
        self._sinks.append(make())

    def _each(self, what: str, action: Callable[[Sink], None]) -> None:
        self._sinks = [sink for sink in self._sinks if self.attempt(sink.name, what, partial(action, sink))]


class ConsoleSink(Sink):
    """One readable line per step, evaluation and alert."""

    name = "console"

    def __init__(self, *, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
        """Take two ways to write a line, as the logger's `info` and `warning`."""
        self._say = say
        self._warn = warn
        self._previous_reward: float | None = None
        self._recent_seconds: deque[float] = deque(maxlen=NUM_STEPS_FOR_REMAINING_TIME)

    def step(self, report: StepReport) -> None:
        self._recent_seconds.append(report.seconds)
        seconds_per_step = sum(self._recent_seconds) / len(self._recent_seconds)
        remaining_seconds = seconds_per_step * (report.num_steps - report.step)
        self._say(step_text(report, previous_reward=self._previous_reward, remaining_seconds=remaining_seconds))
        self._previous_reward = report.get(records.REWARD)

    def evaluation(self, report: EvaluationReport) -> None:
        self._say(evaluation_text(report))

    def alert(self, alert: Alert) -> None:
        self._warn(f"{alert.severity}: {alert.line()}")


class JsonlSink(Sink):
    """Appends to `metrics.jsonl`; every line is on its way to the disk before the next step starts."""

    name = "metrics.jsonl"

    def __init__(self, folder: Path, *, resume_step: int, clock: Callable[[], float] = time.time) -> None:
        """Open the run's file. Lines of steps after `resume_step` move to `metrics.discarded.jsonl`."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / history.FILE_NAME
        self.cut = history.cut_history(file, resume_step=resume_step)
        self._clock = clock
        self._file: TextIO = file.open("a", encoding="utf-8")

    def step(self, report: StepReport) -> None:
        self._append(history.step_line(report, time=self._clock()))

    def evaluation(self, report: EvaluationReport) -> None:
        self._append(history.evaluation_line(report, time=self._clock()))

    def alert(self, alert: Alert) -> None:
        self._append(history.alert_line(alert, time=self._clock()))

    def close(self) -> None:
        self._file.close()

    def _append(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


class TensorboardSink(Sink):
    """Every metric as a scalar over the step, through `torch.utils.tensorboard`."""

    name = "tensorboard"

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        """Open an event file. Steps after `resume_step` that an earlier start wrote are purged by the reader."""
        # Slow to import, and not wanted where TensorBoard is off.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = resume_step + 1 if resume_step else 0
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def step(self, report: StepReport) -> None:
        seconds = {**report.phase_seconds, **report.nested_seconds, "step": report.seconds}
        values = {**report.values, **{history.SECONDS_PREFIX + path: value for path, value in seconds.items()}}
        for name, value in values.items():
            self._writer.add_scalar(name, value, report.step)
        self._writer.flush()

    def evaluation(self, report: EvaluationReport) -> None:
        for name, value in report.values.items():
            self._writer.add_scalar(name, value, report.step)
        self._writer.flush()

    def alert(self, alert: Alert) -> None:
        self._writer.add_text("alerts", f"{alert.severity}: {alert.line()}", alert.step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class RolloutSink(Sink):
    """Writes a step's rollouts to `rollouts/step-000040.jsonl`, one line each, for people to read."""

    name = "rollouts"

    def __init__(self, folder: Path, *, every_steps: int) -> None:
        """Write the first step and every `every_steps`-th; 0: none."""
        self._folder = folder
        self._every_steps = every_steps

    def rollouts(self, step: int, rollouts: Sequence[ScoredRollout], advantages: Sequence[float | None]) -> None:
        if not self._every_steps or (step != 1 and step % self._every_steps):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"step-{step:06d}.jsonl"
        temporary = file.with_name(file.name + ".tmp")
        with temporary.open("w", encoding="utf-8", errors="backslashreplace") as lines:
            for scored, advantage in zip(rollouts, advantages, strict=True):
                lines.write(json.dumps(_rollout_record(scored, advantage), ensure_ascii=False) + "\n")
        os.replace(temporary, file)


def _rollout_record(scored: ScoredRollout, advantage: float | None) -> dict[str, Any]:
    rollout = scored.rollout
    return {
        "prompt_id": rollout.prompt_id,
        "index": rollout.index,
        "source": scored.prompt.source,
        "prompt": scored.prompt.text,
        "answer": rollout.text,
        "score": scored.reward.score,
        "parts": dict(scored.reward.parts),
        "error": scored.reward.error,
        "advantage": advantage,
        "finish_reason": rollout.finish_reason,
        "num_prompt_tokens": len(scored.prompt.token_ids),
        "num_answer_tokens": rollout.num_tokens,
        "versions": [[span.start, span.end, span.version] for span in rollout.versions],
    }
