"""From probabilities to tokens: random numbers from seeds, draws, and the tokens that top-k, top-p and min-p leave."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

_BLOCK = 256
"""Columns summed together: the cumulative sum runs over blocks first, then inside one."""
_LOW = 0xFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def seeds_of(seeds: Sequence[int | None], names: Sequence[str]) -> torch.Tensor:
    """int64 [requests]: each request's seed, or one made from its name."""
    numbers = [
        int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") if seed is None else seed
        for seed, name in zip(seeds, names, strict=True)
    ]
    return torch.tensor([(number + 2**63) % 2**64 - 2**63 for number in numbers], dtype=torch.int64)


def uniform_numbers(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 [rows] in [0, 1): a function of (seed, position) alone, 53 bits.

    Element `position` of the sequence SplitMix64 that starts at the hash of the seed.
    """
    start = _mix(seeds.to(torch.int64).numpy().view(np.uint64) + _GOLDEN)
    step = positions.to(torch.int64).numpy().view(np.uint64) + np.uint64(1)
    return torch.from_numpy((_mix(start + step * _GOLDEN) >> np.uint64(11)) * 2.0**-53)


def _mix(state: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014), modulo 2^64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: per row the first column whose cumulative weight exceeds uniform x total; never one of weight 0.

    Weights [rows, columns] are float32 and need not sum to 1. Sums are float64 over blocks of 256 float32 columns,
    which the chosen block's own float64 sum replaces: a column's probability is off by some 1e-7 of itself.
    """
    blocks = _blocks(weights)
    cumulative = blocks.sum(dim=-1).double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = _below(uniforms[:, None] * total, total)
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.size(1) - 1)  # NaN: the last
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    share = (target - before) / (cumulative.gather(1, block) - before)
    inner = blocks[torch.arange(blocks.size(0)), block[:, 0]].double().cumsum(dim=-1)
    place = torch.searchsorted(inner, _below(share * inner[:, -1:], inner[:, -1:]), right=True)
    return (block * _BLOCK + place)[:, 0].clamp_(max=weights.size(1) - 1)


def sum_of_rows(weights: torch.Tensor) -> torch.Tensor:
    """float64 [rows], accurate where one float32 sum over a whole vocabulary is off by some 1e-7."""
    return _blocks(weights).sum(dim=-1).double().sum(dim=-1)


def _blocks(weights: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, block], with zeros behind the last column."""
    padding = -weights.size(-1) % _BLOCK
    padded = F.pad(weights, (0, padding)) if padding else weights
    return padded.view(padded.size(0), -1, _BLOCK)


def _below(value: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """The value, or the largest number below the limit: rounding must not reach past the last weight."""
    return torch.minimum(value, torch.nextafter(limit, torch.zeros_like(limit)))


def truncate_(
    probabilities: torch.Tensor, *, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """Zero, in place, what is outside of a row's top-k, top-p or min-p, each judged on the untouched probabilities.

    Top-p keeps the smallest set of tokens that reaches it, min-p what has at least this share of the largest
    probability. Of equal probabilities the smaller token id comes first.
    """
    columns = probabilities.size(1)
    for row, (top_k, top_p, min_p) in enumerate(zip(top_ks.tolist(), top_ps.tolist(), min_ps.tolist(), strict=True)):
        if top_k >= columns and top_p >= 1 and min_p <= 0:
            continue
        values, order = probabilities[row].sort(descending=True, stable=True)
        outside = values < values[0] * min_p
        outside[max(top_k, 1) :] = True
        if top_p < 1:
            mass = values.double().cumsum(dim=0)
            outside |= mass - values >= top_p * mass[-1]
        outside[0] = False
        probabilities[row, order[outside]] = 0
    return probabilities


def renormalize_top_k(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Each row's top_k largest probabilities (ties with the last one stay), with sum 1."""
    count = top_ks.reshape(-1).long().clamp(1, probs.shape[-1])
    last = probs.sort(dim=-1, descending=True).values.gather(1, count[:, None] - 1)
    kept = probs.masked_fill(probs < last, 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def renormalize_top_p(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Each row's smallest set of tokens that reaches top_p, with sum 1."""
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    mass = ordered.double().cumsum(dim=-1)
    limit = top_ps.reshape(-1, 1).double()
    outside = mass - ordered >= torch.where(limit < 1, limit * mass[:, -1:], torch.inf)
    outside[:, 0] = False
    kept = torch.zeros_like(probs).scatter(1, index, ordered.masked_fill(outside, 0))
    return kept / kept.sum(dim=-1, keepdim=True)


def murmur_hash(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """uint32 [seeds, columns]: MurmurHash3 (x86, 32 bits, seed 0) of the words seed low, seed high, position, column.

    SGLang derives the random numbers of speculative decoding from it. Numbers are int64: a product may wrap around
    and still has the right low 32 bits.
    """
    seed, positions, columns = (one.to(torch.int64) for one in (seed, positions, columns))
    state = torch.zeros_like(seed)
    for word in (seed & _LOW, (seed >> 32) & _LOW, positions & _LOW):
        state = _murmur_step(state, word)
    state = _murmur_step(state[:, None], columns[None, :] & _LOW) ^ 16  # bytes hashed
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _LOW
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _LOW
    return (state ^ (state >> 16)).to(torch.uint32)


def _murmur_step(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = (word * 0xCC9E2D51) & _LOW
    word = ((word << 15) | (word >> 17)) & _LOW
    state = state ^ ((word * 0x1B873593) & _LOW)
    state = ((state << 13) | (state >> 19)) & _LOW
    return (state * 5 + 0xE6546B64) & _LOW
