"""How far the trainer's log-probs are from those of the engine that sampled, and what corrects for it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_megatron.algorithms.kl import kl_values
from grpo_megatron.algorithms.token_sums import TokenSums, masked_max, masked_sum


@dataclass(frozen=True)
class ImportanceWeights:
    """Per-target factors for the policy loss, and what they looked like."""

    weights: Tensor  # [targets], without gradient, 1 where masked
    statistics: TokenSums


def measure_gap(trainer_logprobs: Tensor, *, rollout_logprobs: Tensor, loss_mask: Tensor) -> TokenSums:
    """Return the sums of the train-vs-rollout gap over the trained targets, both of the same policy version.

    `gap/mean` and `gap/max` are of |p_train - p_rollout|, `gap/logprob_mean` of the difference of logs, and `gap/kl`
    estimates KL(rollout || train): the tokens are the engine's, so it is k3 of log rollout - log train.
    """
    mask = loss_mask.to(torch.bool)
    trainer = torch.where(mask, trainer_logprobs.detach(), 0.0)
    rollout = torch.where(mask, rollout_logprobs.detach(), 0.0).to(trainer.dtype)
    probability_gap = (trainer.exp() - rollout.exp()).abs()
    means = {
        "gap/mean": probability_gap,
        "gap/logprob_mean": (trainer - rollout).abs(),
        "gap/kl": kl_values(rollout - trainer, "k3"),
    }
    return TokenSums(
        totals={name: masked_sum(values, mask) for name, values in means.items()},
        counts=dict.fromkeys(means, mask.sum(dtype=torch.float64)),
        maxima={"gap/max": masked_max(probability_gap, mask)},
    )


def truncated_importance_weights(
    trainer_logprobs: Tensor, *, rollout_logprobs: Tensor, loss_mask: Tensor, cap: float
) -> ImportanceWeights:
    """Return min(p_train / p_rollout, cap) per target (truncated importance sampling).

    The trainer's log-probs are those of the version that sampled, not of the policy as updated since: how far that
    has moved is what the clipped ratio of the loss measures.
    """
    mask = loss_mask.to(torch.bool)
    log_ratio = torch.where(mask, trainer_logprobs.detach() - rollout_logprobs.detach(), 0.0)
    # Bounding the logarithm gives the same minimum and cannot overflow.
    weights = torch.exp(log_ratio.clamp(max=math.log(cap)))
    truncated = (log_ratio > math.log(cap)).to(weights.dtype)
    weights = torch.where(mask, weights, 1.0)
    num_tokens = mask.sum(dtype=torch.float64)
    statistics = TokenSums(
        totals={
            "mismatch/weight_mean": masked_sum(weights, mask),
            "mismatch/truncated_share": masked_sum(truncated, mask),
        },
        counts={"mismatch/weight_mean": num_tokens, "mismatch/truncated_share": num_tokens},
    )
    return ImportanceWeights(weights, statistics)
