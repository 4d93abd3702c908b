"""What sinks, alerts, plots and the run report are given, and the names of the metrics that they look for.

Any other metric passes through to `metrics.jsonl` and TensorBoard under its own name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["warning", "alert"]

REWARD = "reward/score_mean"
REWARD_ERROR_SHARE = "reward/error_share"
SIGNAL_SHARE = "groups/signal_share"
ANSWER_TOKENS = "answer/tokens_mean"
TRUNCATED_SHARE = "answer/truncated_share"
LOSS = "loss/total"
KL_REFERENCE = "policy/kl_reference"
ENTROPY = "policy/entropy"
CLIP_LOW_SHARE = "policy/clip_low_share"
CLIP_HIGH_SHARE = "policy/clip_high_share"
GAP_MEAN = "gap/mean"
GAP_MAX = "gap/max"
GRADIENT_NORM = "optimizer/gradient_norm"
LEARNING_RATE = "optimizer/learning_rate"
ROLLOUT_TOKENS_PER_SECOND = "speed/rollout_tokens_per_second"
"""Sampled tokens per second of the rollout phase, over all ranks."""
UPDATE_TOKENS_PER_SECOND = "speed/update_tokens_per_second"
"""Prompt and answer tokens per second of the update phase, over all ranks."""
ENGINE_RESTARTS = "engine/restarts"
"""Rollout engines that were lost and started again while they generated."""
ACCURACY = "evaluation/accuracy"
ANYWHERE = "evaluation/anywhere"
NUM_PROBLEMS = "evaluation/num_problems"


@dataclass(frozen=True)
class StepReport:
    """One step in numbers.

    Example:
        >>> report = StepReport(12, 40, {REWARD: 0.41}, {"rollout": 3.0, "update": 5.5, "other": 0.5}, 9.0)
        >>> report.get(REWARD), report.get(LOSS)
        (0.41, None)
    """

    step: int
    """Counted from 1: the policy version that the step made. Evaluation at the start belongs to 0."""
    num_steps: int
    values: Mapping[str, float]
    phase_seconds: Mapping[str, float]
    """Sum to `seconds`; the rest is `other`."""
    seconds: float
    nested_seconds: Mapping[str, float] = field(default_factory=dict)
    """Parts of phases by path, `update/optimizer`."""

    def get(self, name: str) -> float | None:
        return self.values.get(name)


@dataclass(frozen=True)
class EvaluationReport:
    """Held-out problems answered by one policy version.

    Example:
        >>> EvaluationReport(0, {ACCURACY: 0.27, NUM_PROBLEMS: 243}, 8.5).step
        0
    """

    step: int
    values: Mapping[str, float]
    seconds: float


@dataclass(frozen=True)
class Alert:
    """One finding, with what to do about it.

    Example:
        >>> Alert(12, "alert", "gap/mean", 0.02, 0.01, "compare dtypes").line()
        'step 12: gap/mean is 0.02, limit 0.01: compare dtypes'
    """

    step: int
    severity: Severity
    metric: str
    value: float
    limit: float | None
    """None where no number is the limit: the value is none itself."""
    advice: str

    def line(self) -> str:
        limit = "" if self.limit is None else f", limit {self.limit:.4g}"
        return f"step {self.step}: {self.metric} is {self.value:.4g}{limit}: {self.advice}"
