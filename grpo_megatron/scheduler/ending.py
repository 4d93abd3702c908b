"""What a run leaves behind when all its steps are done: an HF folder, plots, a report."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_megatron.families.base import ModelDescription
from grpo_megatron.memory.manager import MemoryManager
from grpo_megatron.monitor.plots import write_plots
from grpo_megatron.monitor.run_report import build_run_report, report_text, write_run_report
from grpo_megatron.monitor.sinks import SinkSet
from grpo_megatron.parallel.collectives import broadcast_object
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.weights.export import export_hf


def finish_run(
    folder: Path,
    chunks: Sequence[Any],
    description: ModelDescription,
    *,
    source_folder: Path,
    version: int,
    has_trained: bool,
    export: bool,
    train_seconds: float,
    groups: Groups,
    memory: MemoryManager,
    sinks: SinkSet,
    say: Callable[[str], None],
) -> None:
    """Export, draw, report. Collective over the world.

    Args:
        has_trained: whether this start of the run has done a step.
    """
    target = folder / "exports" / f"version-{version:06d}"
    if export:
        memory.require("export", {"policy_parameters"})
        if groups.rank == 0 and has_trained and target.exists():
            shutil.rmtree(target)  # of the same steps, done before a resume from further back
        is_there = broadcast_object(target.exists(), 0, groups.world)  # a finished run was started again
        if not is_there:
            report = export_hf(chunks, description, target, source_folder=source_folder, groups=groups)
            say(f"exported {report.num_bytes / 1e6:.0f} MB to {target} in {report.seconds:.1f} s")
    if groups.rank == 0:
        sinks.attempt("plots", "the end of the run", lambda: write_plots(folder))

        def report_run() -> None:
            summary = build_run_report(folder, disabled_sinks=sinks.failures)
            summary = replace(summary, train_seconds=train_seconds, export=str(target) if export else None)
            write_run_report(folder, summary)
            for line in report_text(summary).splitlines():
                say(line)
            say(f"plots/ and report.json are in {folder}")

        sinks.attempt("report.json", "the end of the run", report_run)
