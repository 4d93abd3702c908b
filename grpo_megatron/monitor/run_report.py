"""The run in numbers at its end, as text for people and JSON for programs. Reads `metrics.jsonl`, measures nothing."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from grpo_megatron.monitor import records
from grpo_megatron.monitor.console import duration_text
from grpo_megatron.monitor.history import FILE_NAME, History, read_history
from grpo_megatron.monitor.records import EvaluationReport, StepReport

NUM_STEPS_OF_ENDS = 3
"""First and last rewards are means of up to this many steps: a single step is noisy."""


@dataclass(frozen=True)
class RunReport:
    """What a run did.

    Example:
        >>> RunReport(run="sums", num_steps=40, seconds=360.0, reward_first=0.2, reward_last=0.7).reward_last
        0.7
    """

    run: str
    num_steps: int
    seconds: float
    """Of the steps, work that was done again after a resume counted once; start-up and evaluations are extra."""
    train_seconds: float | None = None
    """The same as the run itself counted it, if it got to its end."""
    export: str | None = None
    """HF folder of the final policy, if it was exported."""
    reward_first: float | None = None
    reward_last: float | None = None
    accuracy_before: float | None = None
    """Of the first evaluation, if it is the one before the first step."""
    accuracy_after: float | None = None
    """Of the last evaluation, if it is the one after the last step."""
    anywhere_before: float | None = None
    anywhere_after: float | None = None
    num_problems: int | None = None
    evaluation_seconds: float = 0.0
    rollout_tokens_per_second: float | None = None
    """Over the whole run: tokens by seconds, not the mean of the steps' rates."""
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    nested_seconds: Mapping[str, float] = field(default_factory=dict)
    num_alerts: Mapping[str, int] = field(default_factory=dict)
    """Metric -> alerts and warnings about it."""
    disabled_sinks: Mapping[str, str] = field(default_factory=dict)
    num_unreadable_lines: int = 0


def build_run_report(folder: Path, *, disabled_sinks: Mapping[str, str]) -> RunReport:
    """Sum up the run in `folder`; `disabled_sinks` are those that `SinkSet` had to switch off."""
    history = read_history(folder / FILE_NAME)
    steps = history.steps
    rewards = [reward for report in steps if (reward := report.get(records.REWARD)) is not None]
    num_alerts: dict[str, int] = {}
    for alert in history.alerts:
        num_alerts[alert.metric] = num_alerts.get(alert.metric, 0) + 1
    before, after = _evaluation_values(history, 0), _evaluation_values(history, steps[-1].step if steps else 0)
    num_problems = after.get(records.NUM_PROBLEMS, before.get(records.NUM_PROBLEMS))
    return RunReport(
        run=folder.name,
        num_steps=len(steps),
        seconds=sum(report.seconds for report in steps),
        reward_first=_mean(rewards[: _steps_of_ends(len(rewards))]),
        reward_last=_mean(rewards[-_steps_of_ends(len(rewards)) :]),
        accuracy_before=before.get(records.ACCURACY),
        accuracy_after=after.get(records.ACCURACY) if steps else None,
        anywhere_before=before.get(records.ANYWHERE),
        anywhere_after=after.get(records.ANYWHERE) if steps else None,
        num_problems=None if num_problems is None else round(num_problems),
        evaluation_seconds=sum(report.seconds for report in history.evaluations),
        rollout_tokens_per_second=_tokens_per_second(history),
        phase_seconds=_sums(report.phase_seconds for report in steps),
        nested_seconds=_sums(report.nested_seconds for report in steps),
        num_alerts=num_alerts,
        disabled_sinks=dict(disabled_sinks),
        num_unreadable_lines=history.num_unreadable_lines,
    )


def report_text(report: RunReport) -> str:
    """Return the report as a few readable lines."""
    per_step = report.seconds / report.num_steps if report.num_steps else 0.0
    lines = [f"run {report.run}: {report.num_steps} steps in {duration_text(report.seconds)}, {per_step:.1f} s a step"]
    lines += _change("reward", report.reward_first, report.reward_last, _window_text(report.num_steps))
    problems = "held out" if report.num_problems is None else f"{report.num_problems} held-out problems"
    lines += _change("accuracy", report.accuracy_before, report.accuracy_after, problems)
    lines += _change("anywhere in the text", report.anywhere_before, report.anywhere_after, problems)
    if report.rollout_tokens_per_second is not None:
        lines.append(f"rollout: {report.rollout_tokens_per_second:.0f} tokens/s")
    if report.seconds:
        phases = [
            f"{name} {seconds:.1f} s ({seconds / report.seconds:.0%})" for name, seconds in report.phase_seconds.items()
        ]
        lines.append("time: " + ", ".join(phases))
    if report.evaluation_seconds:
        lines.append(f"evaluations: {report.evaluation_seconds:.1f} s")
    lines += [f"alerts: {count} about {metric}" for metric, count in report.num_alerts.items()]
    lines += [f"switched off: {name} ({error})" for name, error in report.disabled_sinks.items()]
    if report.num_unreadable_lines:
        lines.append(f"{FILE_NAME}: {report.num_unreadable_lines} lines could not be read and are in no figure")
    return "\n".join(lines)


def write_run_report(folder: Path, report: RunReport) -> list[Path]:
    """Write `report.json` and `report.txt` into the run's folder."""
    texts = {
        "report.json": json.dumps(dataclasses.asdict(report), indent=2) + "\n",
        "report.txt": report_text(report) + "\n",
    }
    files = []
    for name, text in texts.items():
        temporary = folder / f"{name}.tmp"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, folder / name)
        files.append(folder / name)
    return files


def _steps_of_ends(num_steps: int) -> int:
    """The two ends of a run do not overlap, unless it has a single step."""
    return max(1, min(NUM_STEPS_OF_ENDS, num_steps // 2))


def _window_text(num_steps: int) -> str:
    window = _steps_of_ends(num_steps)
    return "first and last step" if window == 1 else f"means of {window} steps"


def _evaluation_values(history: History, step: int) -> Mapping[str, float]:
    reports: list[EvaluationReport | StepReport] = [*history.evaluations, *history.steps]
    for report in reports:
        if report.step == step and records.ACCURACY in report.values:
            return report.values
    return {}


def _tokens_per_second(history: History) -> float | None:
    tokens = seconds = 0.0
    for report in history.steps:
        rate = report.get(records.ROLLOUT_TOKENS_PER_SECOND)
        if rate is not None and "rollout" in report.phase_seconds:
            tokens += rate * report.phase_seconds["rollout"]
            seconds += report.phase_seconds["rollout"]
    return tokens / seconds if seconds else None


def _sums(pieces: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for piece in pieces:
        for name, seconds in piece.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sums


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _change(what: str, first: float | None, last: float | None, note: str) -> list[str]:
    if first is None and last is None:
        return []
    if first is None or last is None:
        value = last if first is None else first
        return [f"{what}: {value:.3f} {'at the end' if first is None else 'at the start'} ({note})"]
    return [f"{what}: {first:.3f} -> {last:.3f} ({last - first:+.3f}; {note})"]
