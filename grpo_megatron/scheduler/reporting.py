"""A step in numbers: collects what the phases returned, hands it to the sinks, asks the alert rules."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from grpo_megatron.monitor import records
from grpo_megatron.monitor.alerts import AlertRules, Verdict
from grpo_megatron.monitor.metrics import MetricSums, largest, merge
from grpo_megatron.monitor.records import EvaluationReport, StepReport
from grpo_megatron.monitor.sinks import SinkSet
from grpo_megatron.scheduler.batches import StepBatch
from grpo_megatron.scheduler.evaluation import EvaluationResult
from grpo_megatron.scheduler.ledger import Ledger
from grpo_megatron.scheduler.scores import ScoredStep
from grpo_megatron.scheduler.updates import StepStats
from grpo_megatron.utils.spans import PhaseTimer
from grpo_megatron.weights.publish import PublishReport


@dataclass(frozen=True)
class JudgedStep:
    """A step's report and what the rules think of it, the same on every rank but for the seconds."""

    report: StepReport
    verdict: Verdict
    ledger_error: str | None
    """On rank 0: why the account of the step could not be written."""


class Reporter:
    """`sinks` and `ledger` do something on rank 0 only; the rules run on every rank, on the same numbers."""

    def __init__(
        self,
        timer: PhaseTimer,
        sinks: SinkSet,
        rules: AlertRules,
        ledger: Ledger | None,
        *,
        num_steps: int,
        warn: Callable[[str], None],
    ) -> None:
        self._timer = timer
        self._sinks = sinks
        self._rules = rules
        self._ledger = ledger
        self._num_steps = num_steps
        self._warn = warn

    def report(
        self, step: int, scored: ScoredStep, batch: StepBatch, stats: StepStats, published: PublishReport | None
    ) -> JudgedStep:
        """End the step's clock and tell everybody. Not collective."""
        seconds = self._timer.finish_step()
        values = {
            **merge([rollout_sums(scored), stats.sums]).values(),
            **_group_values(scored, batch),
            **_update_values(stats),
            **_speed_values(scored, stats, seconds.phases.get("update", 0.0)),
            **_engine_values(scored, published),
        }
        report = StepReport(step + 1, self._num_steps, values, seconds.phases, seconds.total, seconds.nested)
        health = self._rules.judge(report)
        self._sinks.step(report)
        _warn_of_errors(scored, self._warn)
        for alert in health.alerts:
            self._sinks.alert(alert)
        self._sinks.rollouts(step + 1, scored.scored, batch.groups.advantages)
        return JudgedStep(report, health.verdict, self._write_ledger(step + 1, scored, batch))

    def _write_ledger(self, step: int, scored: ScoredStep, batch: StepBatch) -> str | None:
        if self._ledger is None:
            return None
        try:
            self._ledger.write(step, scored, batch)
        except OSError as error:
            return f"ledger of step {step}: {error}"
        return None

    def evaluation(self, result: EvaluationResult) -> None:
        """Tell the sinks about an evaluation."""
        values = {
            records.ACCURACY: result.accuracy,
            "evaluation/ended_share": result.ended_share,
            "evaluation/error_share": result.error_share,
            records.NUM_PROBLEMS: float(result.num_problems),
        }
        if result.anywhere is not None:
            values[records.ANYWHERE] = result.anywhere
        self._sinks.evaluation(EvaluationReport(result.version, values, result.seconds))


def _warn_of_errors(step: ScoredStep, warn: Callable[[str], None]) -> None:
    """How many scores failed, and the most frequent reason."""
    errors = Counter(each.reward.error for each in step.scored if each.reward.error is not None)
    if errors:
        (text, _), *_ = errors.most_common(1)
        warn(f"step {step.step + 1}: {errors.total()} of {len(step.scored)} scores failed, most often: {text}")


def rollout_sums(step: ScoredStep) -> MetricSums:
    """Rewards (over all, by part, by source) and lengths of a step's rollouts."""
    scored = step.scored
    pieces = [
        MetricSums.of_values("reward/score", [each.reward.score for each in scored if each.reward.score is not None]),
        MetricSums.of_values("answer/tokens", [each.rollout.num_tokens for each in scored]),
        MetricSums.of_shares(
            {
                records.REWARD_ERROR_SHARE: (sum(each.reward.error is not None for each in scored), len(scored)),
                records.TRUNCATED_SHARE: (sum(each.rollout.finish_reason == "length" for each in scored), len(scored)),
            }
        ),
    ]
    means: dict[str, tuple[float, float]] = {}

    def add(name: str, value: float) -> None:
        total, count = means.get(name, (0.0, 0.0))
        means[name] = (total + value, count + 1)

    several_sources = len({each.prompt.source for each in scored}) > 1
    for each in scored:
        for part, value in each.reward.parts.items():
            add(f"reward/part/{part}", value)
        if several_sources and each.reward.score is not None:
            add(f"reward/source/{each.prompt.source}", each.reward.score)
    return merge([*pieces, MetricSums.of_shares(means)])


def _group_values(scored: ScoredStep, batch: StepBatch) -> dict[str, float]:
    dropped = {f"dropped/{reason}": float(count) for reason, count in batch.train.num_dropped.items()}
    errors: dict[str, float] = {}
    for stats in scored.rewards:
        for kind, count in stats.errors.items():
            errors[f"reward/errors/{kind}"] = errors.get(f"reward/errors/{kind}", 0.0) + count
    replaced = float(sum(stats.num_workers_replaced for stats in scored.rewards))
    return {
        records.SIGNAL_SHARE: batch.groups.signal_share,
        "groups/trained_rollouts": float(batch.train.num_rollouts),
        "reward/workers_replaced": replaced,
        **errors,
        **dropped,
    }


def _engine_values(scored: ScoredStep, published: PublishReport | None) -> dict[str, float]:
    """Of engines in processes of their own; nothing for the embedded one."""
    if published is None:
        return {}
    return {
        records.ENGINE_RESTARTS: float(scored.num_restarts),
        "publish/bytes": float(published.num_bytes),
        "publish/bytes_per_second": published.num_bytes / published.seconds,
        "publish/compared_tensors": float(published.num_compared),
        "publish/peak_extra_bytes": float(published.peak_extra_bytes),
    }


def _update_values(stats: StepStats) -> dict[str, float]:
    values = {records.LEARNING_RATE: stats.learning_rate, "optimizer/skipped_steps": float(stats.num_skipped)}
    if stats.gradient_norms:
        values[records.GRADIENT_NORM] = largest(stats.gradient_norms)
    return values


def _speed_values(scored: ScoredStep, stats: StepStats, update_seconds: float) -> dict[str, float]:
    values = {}
    num_new_tokens = sum(each.rollout.num_tokens for each in scored.scored)
    if scored.rollout_seconds > 0:
        values[records.ROLLOUT_TOKENS_PER_SECOND] = num_new_tokens / scored.rollout_seconds
    if update_seconds > 0 and stats.num_packed_tokens:
        values[records.UPDATE_TOKENS_PER_SECOND] = stats.num_packed_tokens / update_seconds
    return values
