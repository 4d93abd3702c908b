"""Statistics over trained tokens as sums, so that pieces add up to exactly what the whole would give."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_EXPONENT = 20.0
"""Differences of log-probs are bounded by this before `exp`: e^20 = 5e8 is finite in fp32, and so are its products."""


@dataclass(frozen=True)
class TokenSums:
    """Numerators, denominators and maxima of one micro-batch, still on its device: reading them waits for it.

    A mean is `totals[name] / counts[name]`, taken after everything has been added up.

    Example:
        >>> sums = TokenSums({"gap/mean": torch.tensor(0.5)}, {"gap/mean": torch.tensor(2.0)})
        >>> sums.means()
        {'gap/mean': (0.5, 2.0)}
    """

    totals: Mapping[str, Tensor] = field(default_factory=dict)  # each float64 []
    counts: Mapping[str, Tensor] = field(default_factory=dict)  # each float64 []
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # each float64 [], -inf without any token

    def joined(self, other: "TokenSums") -> "TokenSums":
        """Return the statistics of both: other names of the same micro-batch."""
        shared = (self.totals.keys() | self.maxima.keys()) & (other.totals.keys() | other.maxima.keys())
        assert not shared, f"statistics of the same name: {sorted(shared)}"
        return TokenSums(
            {**self.totals, **other.totals}, {**self.counts, **other.counts}, {**self.maxima, **other.maxima}
        )

    def means(self) -> dict[str, tuple[float, float]]:
        """Return name -> (total, count) as numbers; names without any token are left out."""
        totals, counts = _numbers(self.totals), _numbers(self.counts)
        return {name: (total, counts[name]) for name, total in totals.items() if counts[name] > 0}

    def largest(self) -> dict[str, float]:
        """Return name -> maximum as numbers; names without any token are left out."""
        return {name: value for name, value in _numbers(self.maxima).items() if value != float("-inf")}


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the float64 sum of `values` where `mask` is true; what stands elsewhere does not matter."""
    return torch.where(mask, values.detach(), 0.0).sum(dtype=torch.float64)


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Return the float64 maximum of `values` where `mask` is true, NaN if one of those is, -inf if there are none."""
    chosen = torch.where(mask, values.detach(), float("-inf")).to(torch.float64)
    return torch.cat([chosen, chosen.new_full((1,), float("-inf"))]).amax()


def _numbers(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    if not tensors:
        return {}
    return dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True))
