"""The clipped GRPO loss of one micro-batch, as a sum that adds up over micro-batches and ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_megatron.algorithms.kl import kl_loss, kl_values
from grpo_megatron.algorithms.token_sums import MAX_EXPONENT, TokenSums, masked_max, masked_sum
from grpo_megatron.config.schema import ClipSection, KlSection


@dataclass(frozen=True)
class PolicyLoss:
    """What one micro-batch contributes to the mini-batch's loss."""

    loss: Tensor  # [], with gradient: sum over targets of weight x loss, not divided by anything
    statistics: TokenSums


def policy_loss(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    weights: Tensor,
    clip: ClipSection,
    kl: KlSection,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    entropy: Tensor | None = None,
) -> PolicyLoss:
    """Return sum of weight x [ -min(r A, clip(r) A) x importance + coefficient x KL ] over the trained targets.

    r = policy / old is clipped to [1 - low, 1 + high] (PPO, https://arxiv.org/abs/1707.06347; separate bounds:
    DAPO, https://arxiv.org/abs/2503.14476). Whatever stands at masked targets, NaN and infinity included, changes
    neither value nor gradient. NaN at a trained target comes through: health rules must see it.

    Args:
        logprobs: of the policy, with gradient  # float32 or float64 [targets]
        advantages: of the target's rollout  # [targets]
        loss_mask: 1 where the target is trained  # [targets]
        weights: from `loss_weights`  # [targets]
        old_logprobs: denominator of the ratio, the policy's at the start of the step or the engine's;
            None: the policy itself, so the ratio is exactly 1  # [targets]
        reference_logprobs: needed where the coefficient is above 0; otherwise KL is reported only  # [targets]
        importance_weights: correction of the difference between trainer and engine  # [targets]
        entropy: of the policy at the target, reported only  # [targets]
    """
    assert logprobs.dtype in (torch.float32, torch.float64), f"log-probs in {logprobs.dtype}, float32 is needed"
    assert kl.coefficient == 0 or reference_logprobs is not None, "KL term without reference log-probs"
    mask = loss_mask.to(torch.bool)
    # Masked values are replaced before exp: afterwards 0 x inf would put NaN into the gradient.
    policy = torch.where(mask, logprobs, 0.0)
    advantages = torch.where(mask, advantages.to(policy.dtype), 0.0)
    weights = torch.where(mask, weights.to(policy.dtype), 0.0)
    old = policy.detach() if old_logprobs is None else _filled(old_logprobs, mask)
    log_ratio = policy - old
    ratio = torch.exp(log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT))

    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)
    if importance_weights is not None:
        losses = losses * _filled(importance_weights, mask)
    loss = (losses * weights).sum()
    statistics = _policy_statistics(losses, weights, mask, advantages, ratio, log_ratio, clip)

    if reference_logprobs is not None:
        log_difference = policy.detach() - _filled(reference_logprobs, mask)
        statistics = statistics.joined(
            _token_mean("policy/kl_reference", kl_values(log_difference, kl.estimator), mask)
        )
    if kl.coefficient > 0:
        kl_losses = kl_loss(policy, log_difference=log_difference, ratio=ratio, estimator=kl.estimator)
        kl_part = kl.coefficient * (kl_losses * weights).sum()
        loss = loss + kl_part
        statistics = statistics.joined(_weighted_mean("loss/kl", kl_part, weights))
    if entropy is not None:
        statistics = statistics.joined(_token_mean("policy/entropy", entropy, mask))
    return PolicyLoss(loss, statistics.joined(_weighted_mean("loss/total", loss, weights)))


def _filled(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.detach(), 0.0)


def _policy_statistics(
    losses: Tensor,
    weights: Tensor,
    mask: Tensor,
    advantages: Tensor,
    ratio: Tensor,
    log_ratio: Tensor,
    clip: ClipSection,
) -> TokenSums:
    """Sums of what the clipping did. A target counts as clipped where the clipped branch is the one taken."""
    clipped_low = (ratio < 1 - clip.low) & (advantages < 0)
    clipped_high = (ratio > 1 + clip.high) & (advantages > 0)
    # Tokens come from the old policy, so KL(old || policy) is k3 of log old - log policy.
    kl_old = kl_values(-log_ratio.detach(), "k3")
    means = {
        "policy/ratio_mean": ratio,
        "policy/clip_low_share": clipped_low,
        "policy/clip_high_share": clipped_high,
        "policy/kl_old": kl_old,
    }
    num_tokens = mask.sum(dtype=torch.float64)
    sums = TokenSums(
        totals={name: masked_sum(values.to(ratio.dtype), mask) for name, values in means.items()},
        counts=dict.fromkeys(means, num_tokens),
        maxima={"policy/ratio_max": masked_max(ratio, mask)},
    )
    return sums.joined(_weighted_mean("loss/policy", (losses * weights).sum(), weights))


def _token_mean(name: str, values: Tensor, mask: Tensor) -> TokenSums:
    return TokenSums({name: masked_sum(values, mask)}, {name: mask.sum(dtype=torch.float64)})


def _weighted_mean(name: str, weighted_sum: Tensor, weights: Tensor) -> TokenSums:
    """A loss is already divided; its weights add up to 1 per mini-batch, and to their number over several."""
    return TokenSums({name: weighted_sum.detach().to(torch.float64)}, {name: weights.sum(dtype=torch.float64)})
