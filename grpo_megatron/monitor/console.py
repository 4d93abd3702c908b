"""What a step, an evaluation and a duration look like in one line."""

from grpo_megatron.monitor import records
from grpo_megatron.monitor.records import EvaluationReport, StepReport

SEPARATOR = " | "


def step_text(report: StepReport, *, previous_reward: float | None, remaining_seconds: float | None) -> str:
    """Return the step in one line; what was not measured is not in it.

    Example: `step 12/40 | reward 0.412 (+0.031) | signal 62% | answer 7.3 tokens | loss +0.0123 | gradient 1.42 |
    kl 1.0e-03 | gap 2.1e-04 | 512 tokens/s | 9.1 s: rollout 3.1, update 5.5, other 0.5 | 4:15 left`
    """
    parts = [
        f"step {report.step}/{report.num_steps}",
        _reward(report, previous_reward),
        _part(report, records.ACCURACY, "accuracy {:.3f}"),
        _part(report, records.SIGNAL_SHARE, "signal {:.0%}"),
        _part(report, records.ANSWER_TOKENS, "answer {:.1f} tokens"),
        _part(report, records.LOSS, "loss {:+.4f}"),
        _part(report, records.GRADIENT_NORM, "gradient {:.3g}"),
        _part(report, records.KL_REFERENCE, "kl {:.1e}"),
        _part(report, records.GAP_MEAN, "gap {:.1e}"),
        _part(report, records.ROLLOUT_TOKENS_PER_SECOND, "{:.0f} tokens/s"),
        _seconds(report),
        "" if not remaining_seconds else f"{duration_text(remaining_seconds)} left",
    ]
    return SEPARATOR.join(part for part in parts if part)


def evaluation_text(report: EvaluationReport) -> str:
    """Return the evaluation in one line: `evaluation after step 40 | accuracy 0.745 | ... | 243 problems | 8.5 s`."""
    values = dict(report.values)
    num_problems = values.pop(records.NUM_PROBLEMS, None)
    parts = [f"evaluation after step {report.step}" if report.step else "evaluation before the first step"]
    parts += [f"{name.removeprefix('evaluation/').replace('_', ' ')} {value:.3f}" for name, value in values.items()]
    if num_problems is not None:
        parts.append(f"{num_problems:.0f} problems")
    return SEPARATOR.join([*parts, f"{report.seconds:.1f} s"])


def duration_text(seconds: float) -> str:
    """Return minutes and seconds, with hours where there are any: `0:07`, `4:15`, `2:03:40`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _part(report: StepReport, metric: str, template: str) -> str:
    value = report.get(metric)
    return "" if value is None else template.format(value)


def _reward(report: StepReport, previous: float | None) -> str:
    reward = report.get(records.REWARD)
    if reward is None:
        return ""
    change = "" if previous is None else f" ({reward - previous:+.3f})"
    return f"reward {reward:.3f}{change}"


def _seconds(report: StepReport) -> str:
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.phase_seconds.items())
    return f"{report.seconds:.1f} s: {phases}" if phases else f"{report.seconds:.1f} s"
