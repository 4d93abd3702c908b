"""Estimates of the divergence between two policies from the log-probs of sampled tokens.

With d = log policy - log reference of a token that the policy sampled, KL(policy || reference) is the mean of

    k1 = d                    unbiased, large variance, may be negative
    k2 = d^2 / 2              biased, small variance
    k3 = exp(-d) + d - 1      unbiased, small variance, never negative

(http://joschu.net/blog/kl-approx.html). That is about values. Differentiating them as they are gives something
else: the gradient of k1 has mean 0, and that of k3 is the gradient of KL(reference || policy). Only k2 gives the
gradient of KL(policy || reference), and only while the sampling policy is the one that is trained. `kl_loss` gives
that gradient for all three.
"""

from typing import Literal

import torch
from torch import Tensor

from grpo_megatron.algorithms.token_sums import MAX_EXPONENT

KlEstimator = Literal["k1", "k2", "k3"]


def kl_values(log_difference: Tensor, estimator: KlEstimator) -> Tensor:
    """Return the estimate of KL(policy || reference) per token, from log policy - log reference."""
    if estimator == "k1":
        return log_difference
    if estimator == "k2":
        return log_difference.square() / 2
    return torch.exp((-log_difference).clamp(max=MAX_EXPONENT)) + log_difference - 1


def kl_loss(logprobs: Tensor, *, log_difference: Tensor, ratio: Tensor, estimator: KlEstimator) -> Tensor:
    """Return ratio x estimate per token, with the gradient ratio x d, that of KL(policy || reference).

    The expectation over tokens of the policy is taken with tokens of an older one, hence the ratio between the two
    (DeepSeek-V3.2, section 3.1). Written out, the derivative of ratio x k is

        k1: ratio x (d + 1)    whose + 1 is a score function: mean 0, only noise, left out
        k2: ratio x d          with the ratio held constant
        k3: ratio x d          exp(-d) cancels

    so one gradient serves all and the estimator chooses the value that is reported. Using ratio x d as it is,
    and not through autograd, keeps the cancellation of k3 exact where exp(-d) is large.
    TRL gives this gradient with `use_bias_correction_kl`, and without it that of KL(reference || policy).

    Args:
        logprobs: of the policy, with gradient  # [tokens]
        log_difference: log policy - log reference, finite  # [tokens]
        ratio: policy / policy that sampled, finite  # [tokens]
    """
    log_difference, ratio = log_difference.detach(), ratio.detach()
    value = ratio * kl_values(log_difference, estimator)
    # The bracket is exactly 0 and carries the gradient only.
    return value + ratio * log_difference * (logprobs - logprobs.detach())
