"""From logits to tokens and log-probs: one softmax, inverse of the cumulative distribution, sums in float64."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

_BLOCK = 256
"""Columns summed together: the cumulative sum runs over blocks first, then inside one."""


@dataclass(frozen=True)
class Draws:
    """What to draw from one step's logits. Several draws may share a row: the first tokens of a group."""

    rows: np.ndarray  # int64 [draws], row of the logits
    uniforms: np.ndarray  # float64 [draws] in [0, 1)
    temperatures: np.ndarray  # float32 [rows], 0 = greedy
    top_p: np.ndarray  # float32 [rows]
    top_k: np.ndarray  # int64 [rows], 0 = all tokens


@dataclass(frozen=True)
class Sampled:
    token_ids: np.ndarray  # int64 [draws]
    logprobs: np.ndarray  # float32 [draws], NaN if the row's logits were not finite


def sample(logits: torch.Tensor, draws: Draws, *, vocab_size: int) -> Sampled:
    """Draw tokens. `logits` [rows, padded vocabulary] may be overwritten.

    The log-prob is log softmax(logits / temperature) over the real vocabulary, before top-k and top-p take tokens
    away: what a trainer recomputes from the policy. Greedy rows take the largest logit and report the log-prob at
    temperature 1.
    """
    logits = logits[:, :vocab_size].float()
    greedy = draws.temperatures == 0
    temperatures = np.where(greedy, np.float32(1), draws.temperatures)
    if (temperatures != 1).any():
        logits = logits.div_(torch.from_numpy(temperatures).to(logits.device)[:, None])
    probabilities = torch.softmax(logits, dim=-1)
    kept = _truncate(probabilities, draws, greedy)
    token_ids = _inverse_cumulative(kept, draws.rows, draws.uniforms)
    for draw in np.flatnonzero(greedy[draws.rows]):
        token_ids[draw] = int(logits[int(draws.rows[draw])].argmax())
    rows, tokens = torch.from_numpy(draws.rows), torch.from_numpy(token_ids)
    chosen = probabilities[rows.to(logits.device), tokens.to(logits.device)].cpu().double()
    # Divides by the sum that softmax should have reached: its own is off by some 1e-7.
    total = _block_sums(probabilities).sum(dim=-1)[rows]
    return Sampled(token_ids, (chosen.log() - total.log()).float().numpy())


def _block_sums(probabilities: torch.Tensor) -> torch.Tensor:
    """float64 [rows, blocks] on the CPU."""
    return _blocks(probabilities).sum(dim=-1).cpu().double()


def _blocks(probabilities: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, block] with zeros behind the vocabulary."""
    padding = -probabilities.size(-1) % _BLOCK
    padded = F.pad(probabilities, (0, padding)) if padding else probabilities
    return padded.view(padded.size(0), -1, _BLOCK)


def _inverse_cumulative(weights: torch.Tensor, rows: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Per draw the first token whose cumulative weight exceeds uniform x total; its weight is never zero."""
    row = torch.from_numpy(rows)
    blocks = _blocks(weights)
    cumulative = blocks.sum(dim=-1).cpu().double().cumsum(dim=-1)[row]
    target = torch.from_numpy(uniforms)[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, _below(target, cumulative[:, -1:]), right=True)
    block.clamp_(max=cumulative.size(1) - 1)  # only NaN gets here: it is reported by its log-prob
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    share = (target - before) / (cumulative.gather(1, block) - before)
    inner = blocks[row.to(weights.device), block[:, 0].to(weights.device)].cpu().double().cumsum(dim=-1)
    # The block's sum in float32 and this one differ by rounding, so the place inside is taken as a share of it.
    offset = torch.searchsorted(inner, _below(share * inner[:, -1:], inner[:, -1:]), right=True)
    token_ids = block[:, 0] * _BLOCK + offset[:, 0]
    return token_ids.clamp_(max=weights.size(1) - 1).numpy()


def _below(value: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """The value, or the largest number below the limit: rounding must not reach past the last weight."""
    return torch.minimum(value, torch.nextafter(limit, torch.zeros_like(limit)))


def _truncate(probabilities: torch.Tensor, draws: Draws, greedy: np.ndarray) -> torch.Tensor:
    """Probabilities with zero outside the top-k, and then outside the smallest set that holds top-p of the rest."""
    rows = np.flatnonzero(~greedy & ((draws.top_k > 0) | (draws.top_p < 1)))
    if rows.size == 0:
        return probabilities
    kept = probabilities.clone()
    for row in rows.tolist():
        descending, order = probabilities[row].sort(descending=True, stable=True)
        if draws.top_k[row] > 0:
            descending[int(draws.top_k[row]) :] = 0
        descending = descending.double() / descending.double().sum()
        before = descending.cumsum(dim=0) - descending
        outside = (before >= float(draws.top_p[row])) | (descending == 0)
        kept[row, order[outside]] = 0
    return kept
