"""Weight of every target in a mean over the whole mini-batch, wherever its other tokens are computed."""

from typing import Literal

import torch
from torch import Tensor

LossMean = Literal["token", "sequence"]


def loss_weights(
    loss_mask: Tensor,
    *,
    rollout_ids: Tensor,
    loss_mean: LossMean,
    num_loss_tokens: int,
    num_loss_rollouts: int,
    tokens_per_rollout: Tensor | None = None,
) -> Tensor:
    """Return w such that the sum of w x loss over all micro-batches and ranks is the mini-batch's mean.

        token:     w = 1 / num_loss_tokens
        sequence:  w = 1 / (num_loss_rollouts x trained tokens of the target's rollout)

    and 0 where the mask is. No other denominator may be applied afterwards: the gradient then does not depend on
    how the mini-batch was cut, packed or padded.

    Args:
        loss_mask: 1 where the target is trained  # [targets]
        rollout_ids: which rollout the target belongs to  # integer [targets]
        num_loss_tokens: trained tokens of the mini-batch over all data-parallel ranks.
        num_loss_rollouts: rollouts with at least one trained token, likewise.
        tokens_per_rollout: trained tokens by rollout id, where a rollout's targets lie in several pieces (context
            parallelism); None: this piece holds its rollouts whole  # integer [rollouts]
    """
    mask = loss_mask.to(torch.bool)
    if loss_mean == "token":
        return mask.to(torch.float32) / max(1, num_loss_tokens)
    rollout_ids = rollout_ids.to(torch.int64)
    if tokens_per_rollout is None:
        tokens_per_rollout = _count_per_rollout(mask, rollout_ids)
    tokens = tokens_per_rollout.to(torch.float32)[rollout_ids]
    # A rollout without trained tokens has no place in the mean, and must not divide by its 0.
    return torch.where(mask, 1.0 / (max(1, num_loss_rollouts) * tokens.clamp(min=1.0)), 0.0)


def _count_per_rollout(mask: Tensor, rollout_ids: Tensor) -> Tensor:
    num_rollouts = int(rollout_ids.max()) + 1 if rollout_ids.numel() else 0
    counts = torch.zeros(num_rollouts, dtype=torch.int64, device=mask.device)
    return counts.index_add(0, rollout_ids, mask.to(torch.int64))
