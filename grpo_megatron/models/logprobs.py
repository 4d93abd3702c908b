"""Log-probs of given tokens and the entropy beside them, from hidden states, over a sharded vocabulary.

Shapes: n targets, h hidden, v this rank's rows of the vocabulary. Everything after the matrix product is float32.
The logits are never gathered over ranks, and exist for one chunk of targets at a time, in backward too.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from grpo_megatron.models.head import HeadDtype, head_logits, mask_padding_


@dataclass(frozen=True)
class HeadSettings:
    """How the head turns hidden states into a distribution."""

    vocab_size: int
    """Real tokens; the padded rows of the weight are outside the softmax."""
    head_dtype: HeadDtype
    group: dist.ProcessGroup
    """Tensor-parallel group over which the vocabulary is split."""
    chunk_targets: int = 1024


@dataclass(frozen=True)
class TargetLogprobs:
    logprobs: torch.Tensor  # float32 [n]
    entropy: torch.Tensor  # float32 [n], no gradient


def target_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, temperature: float, settings: HeadSettings
) -> TargetLogprobs:
    """log softmax(hidden @ weight^T / temperature)[target]. Collective over the tensor-parallel group.

    `hidden` [n, h] is the same on all ranks of the group; its gradient comes back already summed over them.
    """
    logprobs, entropy = _TargetLogprobs.apply(hidden, weight, targets, temperature, settings)
    return TargetLogprobs(logprobs, entropy)


class _TargetLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        settings: HeadSettings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chunks = [
            _chunk_forward(h, weight, t, temperature, settings)
            for h, t in zip(hidden.split(settings.chunk_targets), targets.split(settings.chunk_targets), strict=True)
        ]
        logprobs, log_normalizer, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden, weight, targets, log_normalizer)
        ctx.temperature, ctx.settings = temperature, settings
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, None, None]:
        hidden, weight, targets, log_normalizer = ctx.saved_tensors
        settings, size = ctx.settings, ctx.settings.chunk_targets
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        for start in range(0, max(1, hidden.size(0)), size):
            part = slice(start, start + size)
            logits = _logits(hidden[part], weight, ctx.temperature, settings)
            grad_logits = torch.exp_(logits.sub_(log_normalizer[part, None])).neg_()
            own, columns = _own_columns(targets[part], weight.size(0), settings)
            grad_logits[own, columns[own]] += 1.0
            grad_logits.mul_(grad_logprobs[part, None] / ctx.temperature)
            grad_logits = grad_logits.to(weight.dtype)
            grad_hidden[part] = grad_logits @ weight
            piece = grad_logits.t() @ hidden[part]
            if hidden.size(0) > size:  # pieces add up in float32, so that cutting into chunks costs no precision
                piece = piece.float()
            grad_weight = piece if grad_weight is None else grad_weight.add_(piece)
        assert grad_weight is not None
        if settings.group.size() > 1:
            dist.all_reduce(grad_hidden, group=settings.group)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float, settings: HeadSettings) -> torch.Tensor:
    """float32 [n, v], divided by the temperature, padding at -inf."""
    logits = head_logits(hidden, weight, settings.head_dtype).float()
    if temperature != 1.0:
        logits = logits.div_(temperature)
    return mask_padding_(logits, first_row=settings.group.rank() * weight.size(0), vocab_size=settings.vocab_size)


def _own_columns(targets: torch.Tensor, num_rows: int, settings: HeadSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the targets that lie on this rank, and every target's column here (0 where it is elsewhere)."""
    columns = targets - settings.group.rank() * num_rows
    is_own = (columns >= 0) & (columns < num_rows)
    return is_own.nonzero().squeeze(1), columns.where(is_own, 0)


def _chunk_forward(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, settings: HeadSettings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs, log of the normalizer and entropy of one chunk, each float32 [n]."""
    logits = _logits(hidden, weight, temperature, settings)
    own, columns = _own_columns(targets, weight.size(0), settings)
    largest = logits.amax(-1) if logits.size(0) else logits.new_zeros(0)
    if settings.group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=settings.group)
    chosen = torch.zeros_like(largest)
    chosen[own] = logits[own, columns[own]]
    weights = torch.exp(logits - largest[:, None])
    # entropy = log Z - sum(p * logit); -inf * 0 at the padding must not become NaN
    sums = torch.stack([chosen, weights.sum(-1), (weights * logits.clamp_min(torch.finfo(torch.float32).min)).sum(-1)])
    if settings.group.size() > 1:
        dist.all_reduce(sums, group=settings.group)
    chosen, total, weighted = sums
    log_normalizer = largest + total.log()
    return chosen - log_normalizer, log_normalizer, log_normalizer - weighted / total
