"""Rules that look at every step's report, and the verdict that follows. They find; the scheduler acts.

All ranks must act alike: give them one verdict, made from reduced numbers (`metrics.reduce_over_ranks`) or broadcast.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from grpo_megatron.config.schema import MonitorSection
from grpo_megatron.monitor import records
from grpo_megatron.monitor.records import Alert, Severity, StepReport

Verdict = Literal["go_on", "stop"]

CONSTANT_REWARD_STEPS = 10
NO_SIGNAL_STEPS = 3
GRADIENT_SPIKE_FACTOR = 10.0
"""A gradient norm above this times the median of the last steps is a spike."""
GRADIENT_WINDOW_STEPS = 20
GRADIENT_WINDOW_MINIMUM = 5
REPEAT_AFTER_STEPS = 10
"""While a condition lasts its alert is repeated this often, and not every step."""
STOPPING_METRICS = (records.LOSS, records.GRADIENT_NORM)
"""Without these as numbers the weights are, or will be, no numbers either."""


@dataclass(frozen=True)
class HealthReport:
    """What the rules say about one step.

    Example:
        >>> HealthReport("go_on", ()).verdict
        'go_on'
    """

    verdict: Verdict
    alerts: tuple[Alert, ...]


@dataclass(frozen=True)
class _Rule:
    name: str
    severity: Severity
    metric: str
    limit: float
    needed_steps: int
    """Steps in a row for which the condition must hold."""
    broken: Callable[[float], bool]
    advice: str


class AlertRules:
    """Counts over steps what must not last, so it is part of what a resumed run remembers."""

    def __init__(self, section: MonitorSection, *, max_error_share: float) -> None:
        """Take the limits from `monitor`, and `modules.rewards.max_error_share`."""
        self._rules = _rules(section, max_error_share)
        self._streaks = dict.fromkeys([*(rule.name for rule in self._rules), "constant_reward"], 0)
        self._last_reward: float | None = None
        self._gradient_norms: deque[float] = deque(maxlen=GRADIENT_WINDOW_STEPS)

    def judge(self, report: StepReport) -> HealthReport:
        """Look at the next step and return what is wrong with it. Call it once per step, in order."""
        alerts = self._non_finite(report)
        stop = any(alert.metric in STOPPING_METRICS for alert in alerts)
        for rule in self._rules:
            value = report.get(rule.metric)
            broken = value is not None and math.isfinite(value) and rule.broken(value)
            if self._due(rule.name, broken=broken, needed_steps=rule.needed_steps):
                assert value is not None
                alerts.append(Alert(report.step, rule.severity, rule.metric, value, rule.limit, rule.advice))
        alerts += self._constant_reward(report)
        alerts += self._gradient_spike(report)
        return HealthReport("stop" if stop else "go_on", tuple(alerts))

    def state_dict(self) -> dict[str, Any]:
        return {
            "streaks": dict(self._streaks),
            "last_reward": self._last_reward,
            "gradient_norms": list(self._gradient_norms),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # Rules that came with a newer version start at 0, those that are gone are forgotten.
        self._streaks.update({name: count for name, count in state["streaks"].items() if name in self._streaks})
        self._last_reward = state["last_reward"]
        self._gradient_norms = deque(state["gradient_norms"], maxlen=GRADIENT_WINDOW_STEPS)

    def _due(self, name: str, *, broken: bool, needed_steps: int) -> bool:
        """Count the step and say whether the rule speaks now."""
        self._streaks[name] = self._streaks[name] + 1 if broken else 0
        beyond = self._streaks[name] - needed_steps
        return beyond >= 0 and beyond % REPEAT_AFTER_STEPS == 0

    def _non_finite(self, report: StepReport) -> list[Alert]:
        advice = (
            "the verdict is stop: go back to the last checkpoint, with a smaller learning rate or in float32"
            if any(not math.isfinite(report.values.get(name, 0.0)) for name in STOPPING_METRICS)
            else "look for the first metric that is no finite number, and for broken inputs in that step's rollouts"
        )
        return [
            Alert(report.step, "alert", name, value, None, advice)
            for name, value in report.values.items()
            if not math.isfinite(value)
        ]

    def _constant_reward(self, report: StepReport) -> list[Alert]:
        reward = report.get(records.REWARD)
        if reward is None:
            return []
        same = self._last_reward is not None and reward == self._last_reward
        self._last_reward = reward
        if not self._due("constant_reward", broken=same, needed_steps=CONSTANT_REWARD_STEPS - 1):
            return []
        num_steps = self._streaks["constant_reward"] + 1
        advice = (
            "the reward is the same to the last digit: check the scorer and the answer format in rollouts/, "
            "that modules.training.learning_rate is not 0, and that the problems are not all solved"
        )
        metric = f"{records.REWARD} (steps unchanged)"
        return [Alert(report.step, "alert", metric, float(num_steps), float(CONSTANT_REWARD_STEPS), advice)]

    def _gradient_spike(self, report: StepReport) -> list[Alert]:
        norm = report.get(records.GRADIENT_NORM)
        if norm is None or not math.isfinite(norm):
            return []
        enough = len(self._gradient_norms) >= GRADIENT_WINDOW_MINIMUM
        limit = GRADIENT_SPIKE_FACTOR * statistics.median(self._gradient_norms) if enough else math.inf
        self._gradient_norms.append(norm)
        # A median of 0 (no signal so far) makes every norm a spike: nothing to compare with.
        if limit <= 0 or norm <= limit:
            return []
        advice = "it was clipped to modules.training.clip_gradient_norm; if it comes again, lower the learning rate"
        return [Alert(report.step, "warning", records.GRADIENT_NORM, norm, limit, advice)]


def _rules(section: MonitorSection, max_error_share: float) -> tuple[_Rule, ...]:
    return (
        _Rule(
            "gap_warn",
            "warning",
            records.GAP_MEAN,
            section.gap_warn,
            1,
            lambda value: section.gap_warn < value <= section.gap_alert,
            "trainer and engine disagree: set model.output_head_dtype to float32, compare dtypes and versions",
        ),
        _Rule(
            "gap_alert",
            "alert",
            records.GAP_MEAN,
            section.gap_alert,
            1,
            lambda value: value > section.gap_alert,
            "trainer and engine are different policies: check the last publish and model.output_head_dtype, "
            "or correct with modules.training.mismatch.correction: truncate",
        ),
        _Rule(
            "reward_errors",
            "alert",
            records.REWARD_ERROR_SHARE,
            max_error_share,
            1,
            lambda value: value > max_error_share,
            "scorers fail: the reasons are in rollouts/ under `error`; see modules.rewards.timeout_seconds, workers",
        ),
        _Rule(
            "engine_restarts",
            "alert",
            records.ENGINE_RESTARTS,
            0.0,
            1,
            lambda value: value > 0.0,
            "a rollout engine died or hung and was restarted: logs/engine-N.log says why; it may happen "
            "modules.rollout.max_engine_restarts times, modules.rollout.engine_stall_seconds is what counts as hung",
        ),
        _Rule(
            "no_signal",
            "alert",
            records.SIGNAL_SHARE,
            0.0,
            NO_SIGNAL_STEPS,
            lambda value: value <= 0.0,
            f"no group had mixed scores for {NO_SIGNAL_STEPS} steps: nothing is learnt; take easier or harder prompts, "
            "a larger modules.rollout.group_size, or check the scorer",
        ),
    )
