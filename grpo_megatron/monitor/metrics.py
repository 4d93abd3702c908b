"""Numbers of one step that are collected in pieces, over micro-batches and ranks, and read as if from one piece."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Part = TypeVar("Part")


@dataclass(frozen=True)
class Mean:
    """A mean that can still be added to."""

    total: float
    count: float


@dataclass(frozen=True)
class MetricSums:
    """Pieces of metrics by name. A mean of means would weigh pieces wrongly, so totals and counts travel apart.

    Example:
        >>> one = MetricSums.of_values("answer/tokens", [4, 8])
        >>> other = MetricSums.of_values("answer/tokens", [3])
        >>> merge([one, other]).values()
        {'answer/tokens_mean': 5.0, 'answer/tokens_max': 8.0, 'answer/tokens_min': 3.0}
    """

    means: Mapping[str, Mean] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)
    minima: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_values(cls, name: str, values: Iterable[float]) -> "MetricSums":
        """Return mean, maximum and minimum of values as `<name>_mean`, `<name>_max`, `<name>_min`."""
        numbers = [float(value) for value in values]
        if not numbers:
            return cls()
        return cls(
            means={f"{name}_mean": Mean(math.fsum(numbers), len(numbers))},
            maxima={f"{name}_max": largest(numbers)},
            minima={f"{name}_min": -largest([-number for number in numbers])},
        )

    @classmethod
    def of_shares(cls, shares: Mapping[str, tuple[float, float]]) -> "MetricSums":
        """Return means from name -> (total, count), as `algorithms` gives them; a count of 0 is left out."""
        return cls(means={name: Mean(total, count) for name, (total, count) in shares.items() if count})

    def values(self) -> dict[str, float]:
        """Return every metric as a number; a mean over nothing is left out, and never 0."""
        numbers = {name: mean.total / mean.count for name, mean in self.means.items() if mean.count}
        for kind in (self.sums, self.maxima, self.minima):
            twice = numbers.keys() & kind.keys()
            assert not twice, f"metrics of two kinds under one name: {sorted(twice)}"
            numbers.update(kind)
        return numbers


def merge(pieces: Iterable[MetricSums]) -> MetricSums:
    """Return what the pieces are together. Their order changes no bit: sums are rounded once, at the end."""
    pieces = list(pieces)
    means = _collect(piece.means for piece in pieces)
    return MetricSums(
        means={
            name: Mean(_sum(part.total for part in parts), _sum(part.count for part in parts))
            for name, parts in means.items()
        },
        sums={name: _sum(parts) for name, parts in _collect(piece.sums for piece in pieces).items()},
        maxima={name: largest(parts) for name, parts in _collect(piece.maxima for piece in pieces).items()},
        minima={
            name: -largest([-part for part in parts])
            for name, parts in _collect(piece.minima for piece in pieces).items()
        },
    )


def reduce_over_ranks(own: MetricSums, *, gather: Callable[[MetricSums], Sequence[MetricSums]]) -> MetricSums:
    """Return the whole on every rank. Collective over the ranks of `gather`.

    A rank whose numbers another one holds as well (tensor- and pipeline-parallel ranks of one replica) gives an empty
    `MetricSums()`: it takes part, and nothing counts twice.
    """
    return merge(gather(own))


def _collect(pieces: Iterable[Mapping[str, Part]]) -> dict[str, list[Part]]:
    collected: dict[str, list[Part]] = {}
    for piece in pieces:
        for name, part in piece.items():
            collected.setdefault(name, []).append(part)
    return collected


def _sum(parts: Iterable[float]) -> float:
    numbers = list(parts)
    # fsum refuses infinities of both signs; plain addition makes NaN of them, which health rules look for.
    return math.fsum(numbers) if all(math.isfinite(number) for number in numbers) else float(sum(numbers))


def largest(numbers: Sequence[float]) -> float:
    """Maximum that does not lose NaN: max(0.0, nan) is 0.0 in Python."""
    return math.nan if any(math.isnan(number) for number in numbers) else max(numbers)
