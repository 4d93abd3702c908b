"""Pictures of a run, drawn from `metrics.jsonl` alone: `write_plots` works on a finished run as on a running one."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_megatron.monitor import records
from grpo_megatron.monitor.history import FILE_NAME, History, read_history
from grpo_megatron.monitor.records import EvaluationReport, StepReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, GREY, RED = "#0072b2", "#e69f00", "#009e73", "#8c8c8c", "#d55e00"
PHASE_COLORS = {"rollout": BLUE, "score": GREEN, "update": ORANGE, "publish": "#cc79a7", "other": "#bfbfbf"}
SPARE_COLORS = ("#56b4e9", "#f0e442", "#332288", "#882255")
SMOOTHING_STEPS = 5
DOTS_PER_INCH = 130


def write_plots(folder: Path) -> list[Path]:
    """Draw what the run in `folder` has measured into `plots/` and return the files; what is not there is left out."""
    history = read_history(folder / FILE_NAME)
    panels = [(name, draw) for name, draw, is_there in _PANELS if is_there(history)]
    if not panels:
        return []
    # The object interface, without pyplot, has no global state and needs no display.
    from matplotlib.figure import Figure

    target = folder / "plots"
    target.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in panels:
        figure = Figure(figsize=(7.2, 4.2))
        # Set by hand: an automatic layout draws everything several times over.
        figure.subplots_adjust(left=0.1, right=0.91, bottom=0.12, top=0.92)
        draw(figure.subplots(), history)
        files.append(target / f"{name}.png")
        figure.savefig(files[-1], dpi=DOTS_PER_INCH)
    rows = (len(panels) + 1) // 2
    height = 3.9 * rows + 0.4
    overview = Figure(figsize=(13, height))
    overview.subplots_adjust(left=0.06, right=0.95, bottom=0.5 / height, top=1 - 0.8 / height, wspace=0.24, hspace=0.28)
    overview.suptitle(f"Run {folder.name}", y=1 - 0.15 / height, va="top", fontsize=14, fontweight="bold")
    axes = list(overview.subplots(rows, 2, squeeze=False).flat)
    for (_, draw), ax in zip(panels, axes, strict=False):
        draw(ax, history)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    files.append(target / "overview.png")
    overview.savefig(files[-1], dpi=DOTS_PER_INCH)
    return files


def _draw_reward(ax: "Axes", history: History) -> None:
    steps, rewards = _series(history, records.REWARD)
    _line(ax, steps, rewards, color=BLUE, label="mean reward of the step's rollouts")
    _decorate(ax, "Reward and held-out accuracy" if _accuracies(history) else "Reward", "mean reward")
    if _accuracies(history):
        _draw_accuracy_points(ax, history)
        ax.set_ylabel("mean reward, share right")
    ax.legend(loc="best")


def _draw_accuracy(ax: "Axes", history: History) -> None:
    _draw_accuracy_points(ax, history)
    num_problems = {report.values.get(records.NUM_PROBLEMS) for report in history.evaluations} - {None}
    of = f" of {num_problems.pop():.0f} held-out problems" if len(num_problems) == 1 else ""
    _decorate(ax, "Held-out accuracy", f"share right{of}")
    ax.set_ylim(0, 1)
    ax.legend(loc="best")


def _draw_accuracy_points(ax: "Axes", history: History) -> None:
    for metric, color, label, above in (
        (records.ACCURACY, RED, "held-out accuracy", False),
        (records.ANYWHERE, GREY, "held-out, right number anywhere in the text", True),
    ):
        points = [(report.step, report.values[metric]) for report in _evaluations(history) if metric in report.values]
        if not points:
            continue
        ax.plot(*zip(*points, strict=True), color=color, marker="o", linestyle="--", label=label)
        for step, value in {points[0], points[-1]}:
            ax.annotate(
                f"{value:.3f}",
                (step, value),
                textcoords="offset points",
                xytext=(0, 7 if above else -14),
                ha="center",
                color=color,
            )


def _draw_signal(ax: "Axes", history: History) -> None:
    steps, shares = _series(history, records.SIGNAL_SHARE)
    _line(ax, steps, [100 * share for share in shares], color=GREEN, label="groups with mixed scores")
    _decorate(ax, "Groups with a signal", "% of the step's groups")
    ax.set_ylim(0, 105)
    ax.legend(loc="best")


def _draw_answer_tokens(ax: "Axes", history: History) -> None:
    steps, tokens = _series(history, records.ANSWER_TOKENS)
    _line(ax, steps, tokens, color=BLUE, label="mean answer length")
    _decorate(ax, "Answer length", "tokens")
    ax.set_ylim(0, 1.1 * max([*tokens, 1e-9]))
    steps, shares = _series(history, records.TRUNCATED_SHARE)
    if steps:
        right = ax.twinx()
        right.plot(steps, [100 * share for share in shares], color=GREY, linestyle=":", label="cut off at the limit")
        right.set_ylim(0, 105)
        right.set_ylabel("% of answers cut off")
        right.spines["top"].set_visible(False)
        ax.plot([], [], color=GREY, linestyle=":", label="cut off at the limit (right axis)")
    ax.legend(loc="best")


def _draw_gap(ax: "Axes", history: History) -> None:
    _decorate(ax, "Trainer against engine, same tokens, same version", "|difference of probability|")
    for metric, color, label in ((records.GAP_MAX, GREY, "largest"), (records.GAP_MEAN, RED, "mean")):
        steps, gaps = _series(history, metric)
        if steps:
            ax.plot(steps, gaps, color=color, marker=".", label=label)
    _, gaps = _series(history, records.GAP_MEAN)
    # An exact zero (the same arithmetic on both sides) has no place on a logarithmic axis.
    if all(gap > 0 for gap in gaps):
        ax.set_yscale("log")
    ax.legend(loc="best")


def _draw_seconds(ax: "Axes", history: History) -> None:
    steps = [report.step for report in history.steps]
    phases = list(dict.fromkeys(phase for report in history.steps for phase in report.phase_seconds))
    phases.sort(key=lambda phase: phase == "other")
    spare = iter(SPARE_COLORS * (1 + len(phases)))
    bottom = [0.0] * len(steps)
    for phase in phases:
        seconds = [report.phase_seconds.get(phase, 0.0) for report in history.steps]
        color = PHASE_COLORS.get(phase) or next(spare)
        share = sum(seconds) / max(sum(report.seconds for report in history.steps), 1e-9)
        ax.bar(steps, seconds, bottom=bottom, width=0.9, color=color, label=f"{phase} ({share:.0%})")
        bottom = [below + height for below, height in zip(bottom, seconds, strict=True)]
    _decorate(ax, "Where the time of a step goes", "seconds")
    ax.grid(visible=False, axis="x")
    # Above the bars and never on them.
    ax.set_ylim(0, 1.3 * max([*bottom, 1e-9]))
    ax.legend(loc="upper left", ncols=3, fontsize="small", frameon=False)


def _line(ax: "Axes", steps: Sequence[int], values: Sequence[float], *, color: str, label: str) -> None:
    """Draw values as dots and their running mean as a line: single steps are noisy."""
    if len(steps) <= 2 * SMOOTHING_STEPS:
        ax.plot(steps, values, color=color, marker=".", label=label)
        return
    ax.plot(steps, values, color=color, marker="o", markersize=3, linestyle="none", alpha=0.4)
    ax.plot(steps, _running_mean(values), color=color, linewidth=2, label=f"{label}, mean of {SMOOTHING_STEPS} steps")


def _running_mean(values: Sequence[float]) -> list[float]:
    """Mean of the steps around each one; the window shrinks at the ends, so the line does not lag behind the dots."""
    half = SMOOTHING_STEPS // 2
    means = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        means.append(sum(window) / len(window))
    return means


def _decorate(ax: "Axes", title: str, unit: str) -> None:
    ax.set_title(title, fontweight="bold", loc="left")
    ax.set_xlabel("step (policy version)")
    ax.set_ylabel(unit)
    ax.grid(visible=True, alpha=0.3)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]


def _series(history: History, metric: str) -> tuple[list[int], list[float]]:
    points = [(report.step, report.values[metric]) for report in history.steps if metric in report.values]
    return [step for step, _ in points], [value for _, value in points]


def _evaluations(history: History) -> list[EvaluationReport | StepReport]:
    """Evaluations of their own, or those that came inside of a step's report."""
    return list(history.evaluations) or [report for report in history.steps if records.ACCURACY in report.values]


def _accuracies(history: History) -> bool:
    return any(records.ACCURACY in report.values for report in _evaluations(history))


def _has(metric: str) -> Callable[[History], bool]:
    return lambda history: bool(_series(history, metric)[0])


_PANELS: tuple[tuple[str, Callable[["Axes", History], None], Callable[[History], bool]], ...] = (
    ("reward", _draw_reward, _has(records.REWARD)),
    ("accuracy", _draw_accuracy, _accuracies),
    ("signal", _draw_signal, _has(records.SIGNAL_SHARE)),
    ("answer_tokens", _draw_answer_tokens, _has(records.ANSWER_TOKENS)),
    ("gap", _draw_gap, _has(records.GAP_MEAN)),
    ("seconds", _draw_seconds, lambda history: bool(history.steps)),
)
