"""`metrics.jsonl`: one line per step, evaluation and alert. Written by `sinks.JsonlSink`, read by plots and report."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.monitor.records import Alert, EvaluationReport, StepReport

FILE_NAME = "metrics.jsonl"
DISCARDED_FILE_NAME = "metrics.discarded.jsonl"
SECONDS_PREFIX = "seconds/"

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_STEP_FIELDS = ("kind", "step", "num_steps", "time", "seconds")


@dataclass(frozen=True)
class History:
    """What a run wrote so far, in order of steps; of a step or evaluation done twice, the later one."""

    steps: tuple[StepReport, ...]
    evaluations: tuple[EvaluationReport, ...]
    alerts: tuple[Alert, ...]
    num_unreadable_lines: int


@dataclass(frozen=True)
class CutResult:
    """What `cut_history` moved to `metrics.discarded.jsonl`."""

    num_kept: int
    num_discarded: int


def step_line(report: StepReport, *, time: float) -> str:
    """Return the report as one flat JSON object, so that any table reader takes it as it is."""
    record: dict[str, Any] = {"kind": "step", "step": report.step, "num_steps": report.num_steps, "time": time}
    record["seconds"] = report.seconds
    seconds = {**report.phase_seconds, **report.nested_seconds}
    record |= {SECONDS_PREFIX + path: value for path, value in seconds.items()}
    return _to_json(record | _without_clash(report.values, record))


def evaluation_line(report: EvaluationReport, *, time: float) -> str:
    """Return the evaluation as one flat JSON object."""
    record = {"kind": "evaluation", "step": report.step, "time": time, "seconds": report.seconds}
    return _to_json(record | _without_clash(report.values, record))


def alert_line(alert: Alert, *, time: float) -> str:
    """Return the alert as one flat JSON object."""
    fields = {name: getattr(alert, name) for name in ("step", "severity", "metric", "value", "limit", "advice")}
    return _to_json({"kind": "alert", **fields, "time": time})


def read_history(file: Path) -> History:
    """Read a run's file, also one whose last line was torn when the program died. No file: nothing happened yet."""
    steps: dict[int, StepReport] = {}
    evaluations: dict[int, EvaluationReport] = {}
    alerts: list[Alert] = []
    num_unreadable = 0
    for line in _lines(file):
        record = _parse(line)
        if record is None:
            num_unreadable += 1
        elif record["kind"] == "step":
            steps[record["step"]] = _step_report(record)
        elif record["kind"] == "evaluation":
            evaluations[record["step"]] = _evaluation_report(record)
        else:
            alerts.append(Alert(**{name: record[name] for name in Alert.__dataclass_fields__}))
    return History(
        tuple(steps[step] for step in sorted(steps)),
        tuple(evaluations[step] for step in sorted(evaluations)),
        tuple(alerts),
        num_unreadable,
    )


def cut_history(file: Path, *, resume_step: int) -> CutResult:
    """Keep the lines up to `resume_step`, which the resumed run has behind it, and move the others to a file beside.

    The steps after it are done again and would be there twice; a torn last line would spoil the next one.
    """
    kept: list[str] = []
    discarded: list[str] = []
    for line in _lines(file):
        record = _parse(line)
        (kept if record is not None and record["step"] <= resume_step else discarded).append(line)
    if not discarded:
        return CutResult(len(kept), 0)
    # First beside, then away: a crash in between leaves lines in both files and none in neither.
    with (file.parent / DISCARDED_FILE_NAME).open("a", encoding="utf-8") as beside:
        beside.writelines(line + "\n" for line in discarded)
        beside.flush()
        os.fsync(beside.fileno())
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as rest:
        rest.writelines(line + "\n" for line in kept)
        rest.flush()
        os.fsync(rest.fileno())
    os.replace(temporary, file)
    return CutResult(len(kept), len(discarded))


def _lines(file: Path) -> list[str]:
    if not file.exists():
        return []
    # Not splitlines(): that would also cut at separators that JSON leaves inside of strings.
    return [line for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip()]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("kind") not in ("step", "evaluation", "alert"):
        return None
    if not isinstance(record.get("step"), int):
        return None
    return {name: _NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in record.items()}


def _step_report(record: dict[str, Any]) -> StepReport:
    seconds = {name.removeprefix(SECONDS_PREFIX): v for name, v in record.items() if name.startswith(SECONDS_PREFIX)}
    return StepReport(
        step=record["step"],
        num_steps=record["num_steps"],
        values={
            name: value
            for name, value in record.items()
            if name not in _STEP_FIELDS and not name.startswith(SECONDS_PREFIX)
        },
        phase_seconds={path: value for path, value in seconds.items() if "/" not in path},
        seconds=record["seconds"],
        nested_seconds={path: value for path, value in seconds.items() if "/" in path},
    )


def _evaluation_report(record: dict[str, Any]) -> EvaluationReport:
    values = {name: value for name, value in record.items() if name not in _STEP_FIELDS}
    return EvaluationReport(record["step"], values, record["seconds"])


def _without_clash(values: Mapping[str, float], record: Mapping[str, Any]) -> dict[str, float]:
    clash = sorted(name for name in values if name in record or name in _STEP_FIELDS or name.startswith(SECONDS_PREFIX))
    assert not clash, f"metrics may not be named {clash}"
    return {name: float(value) for name, value in values.items()}


def _to_json(record: Mapping[str, Any]) -> str:
    # JSON has no NaN: Python would write one that other readers refuse, so it becomes a string that `_parse` knows.
    return json.dumps(
        {
            name: _spelled(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        },
        allow_nan=False,
    )


def _spelled(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
