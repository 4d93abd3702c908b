import math

import pytest
import torch

from grpo_megatron.algorithms.mismatch import measure_gap, truncated_importance_weights

pytestmark = pytest.mark.unit


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_gap_by_hand():
    """Trainer 0.5, 0.25, rollout 0.25, 0.5, and a masked NaN: |p - q| = 1/4 twice, |log p/q| = log 2 twice.

    k3 of KL(rollout || train) with train / rollout = 2 and 1/2: (2 - log 2 - 1) + (1/2 + log 2 - 1) = 1/2.
    """
    trainer = torch.cat([logs(0.5, 0.25), torch.tensor([math.nan])])
    sums = measure_gap(
        trainer, rollout_logprobs=torch.cat([logs(0.25, 0.5), logs(1.0)]), loss_mask=torch.tensor([1, 1, 0])
    )
    means = sums.means()
    assert means["gap/mean"] == pytest.approx((0.5, 2.0))
    assert means["gap/logprob_mean"] == pytest.approx((2 * math.log(2), 2.0))
    assert means["gap/kl"] == pytest.approx((0.5, 2.0))
    assert sums.largest() == {"gap/max": pytest.approx(0.25)}


def test_gap_of_equal_logprobs_is_exactly_zero():
    logprobs = torch.tensor([-0.3, -12.5])
    sums = measure_gap(logprobs, rollout_logprobs=logprobs.clone(), loss_mask=torch.ones(2))
    assert all(total == 0.0 for total, _ in sums.means().values())
    assert sums.largest() == {"gap/max": 0.0}


def test_gap_divergence_estimate_is_that_of_rollout_against_trainer():
    """Its mean over the engine's own tokens, enumerated, is KL(rollout || train) and not the other way round."""
    generator = torch.Generator().manual_seed(0)
    trainer, rollout = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = (rollout.exp() * (rollout - trainer)).sum().item()
    mean = sum(
        rollout[i].exp().item()
        * measure_gap(trainer[i : i + 1], rollout_logprobs=rollout[i : i + 1], loss_mask=torch.ones(1)).means()[
            "gap/kl"
        ][0]
        for i in range(6)
    )
    other_way = (trainer.exp() * (trainer - rollout)).sum().item()
    assert mean == pytest.approx(exact, rel=1e-12)
    assert abs(exact - other_way) > 1e-2


def test_an_impossible_token_shows_as_an_infinite_gap():
    sums = measure_gap(torch.tensor([-math.inf]), rollout_logprobs=torch.tensor([-1.0]), loss_mask=torch.ones(1))
    assert sums.means()["gap/logprob_mean"][0] == math.inf


def test_importance_weights_are_truncated_at_the_cap():
    """Ratios 1/2, 3/2, 8 with cap 2; masked NaN and a log-ratio of 1000 become 1 and the cap."""
    rollout = torch.cat([logs(0.5, 0.25, 0.1), torch.tensor([math.nan, -1000.0])])
    trainer = torch.cat([logs(0.25, 0.375, 0.8), torch.tensor([-1.0, 0.0])])
    mask = torch.tensor([1, 1, 1, 0, 1])
    result = truncated_importance_weights(trainer.requires_grad_(), rollout_logprobs=rollout, loss_mask=mask, cap=2.0)
    assert result.weights.tolist() == pytest.approx([0.5, 1.5, 2.0, 1.0, 2.0])
    assert not result.weights.requires_grad
    means = result.statistics.means()
    assert means["mismatch/weight_mean"] == pytest.approx((6.0, 4.0))
    assert means["mismatch/truncated_share"] == (2.0, 4.0)


def test_equal_logprobs_give_weights_of_exactly_one():
    logprobs = torch.tensor([-0.3, -12.5])
    result = truncated_importance_weights(logprobs, rollout_logprobs=logprobs.clone(), loss_mask=torch.ones(2), cap=2.0)
    assert result.weights.tolist() == [1.0, 1.0]
