"""Group-relative advantages from raw scores. Plain float64 numbers: no tensors, no process groups."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

AdvantageScale = Literal["standard_deviation", "none"]

EQUAL_SCORES_TOLERANCE = 1e-6
"""Scores of a group whose spread is at most this share of max(1, largest magnitude) count as all equal."""

SCALE_EPSILON = 1e-6
"""Added to the standard deviation before dividing, so that a hardly mixed group is not blown up."""


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages of one step's rollouts, in the order in which their scores came.

    Example:
        >>> result = group_advantages([("a", 1.0), ("a", 0.0), ("b", 0.5), ("b", None)], scale="none")
        >>> result.advantages
        (0.5, -0.5, 0.0, None)
        >>> result.groups_without_signal
        ('b',)
    """

    advantages: tuple[float | None, ...]
    """None where the rollout has no score: it is no member of its group."""
    has_signal: tuple[bool, ...]
    """False where the advantage is None or the whole group's advantages are 0: nothing to learn there."""
    groups_without_signal: tuple[Hashable, ...]
    """In order of first appearance: scores all equal, or fewer than two members with a score."""
    num_groups: int
    num_unscored: int

    @property
    def signal_share(self) -> float:
        """Share of the groups that have a signal; 0 without groups."""
        return 1.0 - len(self.groups_without_signal) / self.num_groups if self.num_groups else 0.0


def group_advantages(members: Sequence[tuple[Hashable, float | None]], *, scale: AdvantageScale) -> GroupAdvantages:
    """Return score minus the group's mean for every member, divided by the group's spread if scaled.

    `standard_deviation` is the sample one (divisor n - 1, as in TRL and verl) plus SCALE_EPSILON; `none` leaves
    the difference as it is (Dr. GRPO, https://arxiv.org/abs/2503.20783). Members without a score are outside
    mean and deviation. A group without signal gets exactly 0, whatever rounding its mean would bring.

    Args:
        members: (key of the group, raw score or None) of every rollout. Scores must be raw, without penalties
            for length and the like: those differ between answers that are equally right, and would make groups
            without signal look as if they had one.
    """
    groups: dict[Hashable, list[float]] = {}
    for key, score in members:
        scores = groups.setdefault(key, [])
        if score is not None:
            if not math.isfinite(score):
                raise ValueError(f"group {key!r} has a score of {score}: a scorer must give a finite number or fail")
            scores.append(float(score))

    with_signal = {key: _mean_and_divisor(scores, scale) for key, scores in groups.items() if _has_signal(scores)}
    advantages: list[float | None] = []
    for key, score in members:
        if score is None:
            advantages.append(None)
        elif key in with_signal:
            mean, divisor = with_signal[key]
            advantages.append((float(score) - mean) / divisor)
        else:
            advantages.append(0.0)
    return GroupAdvantages(
        advantages=tuple(advantages),
        has_signal=tuple(score is not None and key in with_signal for key, score in members),
        groups_without_signal=tuple(key for key in groups if key not in with_signal),
        num_groups=len(groups),
        num_unscored=sum(score is None for _, score in members),
    )


def _has_signal(scores: list[float]) -> bool:
    if len(scores) < 2:
        return False
    magnitude = max(1.0, max(abs(score) for score in scores))
    return max(scores) - min(scores) > EQUAL_SCORES_TOLERANCE * magnitude


def _mean_and_divisor(scores: list[float], scale: AdvantageScale) -> tuple[float, float]:
    # fsum rounds once, so the result does not depend on the order in which the answers finished.
    mean = math.fsum(scores) / len(scores)
    if scale == "none":
        return mean, 1.0
    variance = math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
    return mean, math.sqrt(variance) + SCALE_EPSILON
