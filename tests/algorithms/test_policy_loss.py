import math

import pytest
import torch

from grpo_megatron.algorithms.loss_weights import loss_weights
from grpo_megatron.algorithms.policy_loss import policy_loss
from grpo_megatron.config.schema import ClipSection, KlSection

pytestmark = pytest.mark.unit

CLIP = ClipSection(low=0.2, high=0.3)
NO_KL = KlSection()


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_clipped_loss_and_its_gradient_by_hand():
    """Ratios 2, 2, 1/2, 1/2, 1.1 with advantages 1, -1, 1, -1, 1; clip to [0.8, 1.3].

    -min(rA, clip(r)A) = -1.3, 2, -0.5, 0.8, -1.1; where the clipped branch is smaller the gradient is 0,
    elsewhere -rA.
    """
    ratios = tensor(2.0, 2.0, 0.5, 0.5, 1.1)
    old = tensor(-1.0, -2.0, -1.0, -2.0, -3.0)
    logprobs = (old + ratios.log()).requires_grad_()
    result = policy_loss(
        logprobs,
        advantages=tensor(1, -1, 1, -1, 1),
        loss_mask=torch.ones(5),
        weights=torch.full((5,), 1 / 5, dtype=torch.float64),
        clip=CLIP,
        kl=NO_KL,
        old_logprobs=old,
    )
    assert result.loss.item() == pytest.approx((-1.3 + 2.0 - 0.5 + 0.8 - 1.1) / 5, rel=1e-14)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    assert (gradient * 5).tolist() == pytest.approx([0.0, 2.0, -0.5, 0.0, -1.1], rel=1e-14)
    means = result.statistics.means()
    assert means["policy/clip_high_share"] == (1.0, 5.0)
    assert means["policy/clip_low_share"] == (1.0, 5.0)
    assert means["policy/ratio_mean"] == pytest.approx((6.1, 5.0))
    assert result.statistics.largest() == {"policy/ratio_max": pytest.approx(2.0)}
    # KL(old || policy), k3: mean of r - 1 - log r.
    expected_kl = sum(r - 1 - math.log(r) for r in ratios.tolist())
    assert means["policy/kl_old"] == pytest.approx((expected_kl, 5.0))


@pytest.mark.parametrize("kl", [NO_KL, KlSection(0.1, "k1"), KlSection(0.1, "k2"), KlSection(0.1, "k3")])
def test_ratio_is_exactly_one_at_the_policy_itself(kl):
    """In fp32, with and without given old log-probs; the gradient is then the plain policy gradient -A w."""
    logprobs = torch.tensor([-0.123456, -7.654321, -0.5], requires_grad=True)
    for old in (None, logprobs.detach().clone()):
        result = policy_loss(
            logprobs,
            advantages=torch.tensor([1.5, -0.5, 2.0]),
            loss_mask=torch.ones(3),
            weights=torch.tensor([0.5, 0.25, 0.25]),
            clip=CLIP,
            kl=kl,
            old_logprobs=old,
            reference_logprobs=logprobs.detach(),
        )
        (gradient,) = torch.autograd.grad(result.loss, logprobs)
        assert gradient.tolist() == [-0.75, 0.125, -0.5]
        assert result.statistics.means()["policy/ratio_mean"] == (3.0, 3.0)
        assert result.statistics.largest()["policy/ratio_max"] == 1.0


def test_gradient_agrees_with_finite_differences():
    """Everything on at once, away from the kinks of the clipping; k3, whose gradient is the value's derivative."""
    generator = torch.Generator().manual_seed(1)
    old, reference, advantages, noise = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    mask = tensor(1, 1, 0, 1, 1, 1, 0, 1, 1)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return policy_loss(
            logprobs,
            advantages=advantages,
            loss_mask=mask,
            weights=mask / 7,
            clip=CLIP,
            kl=KlSection(0.3, "k3"),
            old_logprobs=old,
            reference_logprobs=reference,
            importance_weights=noise.exp(),
        ).loss

    logprobs = (old + 0.5 * noise).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logprobs), logprobs)
    for i in range(9):
        step = torch.zeros(9, dtype=torch.float64)
        step[i] = 1e-6
        numerical = (loss(logprobs.detach() + step) - loss(logprobs.detach() - step)) / 2e-6
        assert gradient[i].item() == pytest.approx(numerical.item(), abs=1e-8)
    assert gradient.abs().max() > 0.05


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_divergence_term_pulls_towards_the_reference(estimator):
    """Advantage 0: the gradient is coefficient x weight x (log policy - log reference), and not 0."""
    logprobs = tensor(-1.0, -2.0).requires_grad_()
    result = policy_loss(
        logprobs,
        advantages=tensor(0, 0),
        loss_mask=torch.ones(2),
        weights=tensor(0.5, 0.5),
        clip=CLIP,
        kl=KlSection(0.1, estimator),
        reference_logprobs=tensor(-1.5, -1.0),
    )
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    assert gradient.tolist() == pytest.approx([0.1 * 0.5 * 0.5, -0.1 * 0.5 * 1.0])


def test_coefficient_zero_leaves_the_term_out_even_if_the_reference_is_broken():
    """0 x inf would be NaN: the divergence is reported and has no part in the loss."""
    arguments = dict(advantages=tensor(1, -1), loss_mask=torch.ones(2), weights=tensor(0.5, 0.5), clip=CLIP, kl=NO_KL)
    logprobs = tensor(-1.0, -2.0).requires_grad_()
    plain = policy_loss(logprobs, **arguments)
    reported = policy_loss(logprobs, **arguments, reference_logprobs=tensor(-math.inf, -1.0))
    assert reported.loss.item() == plain.loss.item()
    assert torch.autograd.grad(reported.loss, logprobs)[0].tolist() == [-0.5, 0.5]
    assert reported.statistics.means()["policy/kl_reference"][0] == math.inf
    assert "loss/kl" not in reported.statistics.totals
    assert "policy/kl_reference" not in plain.statistics.totals


def test_a_positive_coefficient_without_reference_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="reference"):
        policy_loss(
            tensor(-1.0),
            advantages=tensor(1),
            loss_mask=torch.ones(1),
            weights=tensor(1),
            clip=CLIP,
            kl=KlSection(coefficient=0.1),
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1000.0, -1000.0])
def test_masked_targets_change_neither_value_nor_gradient(bad):
    """NaN, infinities and log-ratios of 1000 in every input at masked targets, in fp32."""

    def run(filler: float) -> tuple[float, list[float], dict]:
        logprobs = torch.tensor([-0.5, filler, -1.5, filler], requires_grad=True)
        other = torch.tensor([-0.6, -filler, -1.2, 0.0])
        result = policy_loss(
            logprobs,
            advantages=torch.tensor([1.0, filler, -1.0, filler]),
            loss_mask=torch.tensor([1.0, 0.0, 1.0, 0.0]),
            weights=torch.tensor([0.5, filler, 0.5, 0.0]),
            clip=CLIP,
            kl=KlSection(coefficient=0.1),
            old_logprobs=other,
            reference_logprobs=other - 0.1,
            importance_weights=torch.tensor([0.9, filler, 1.1, filler]),
            entropy=torch.tensor([1.0, filler, 2.0, filler]),
        )
        (gradient,) = torch.autograd.grad(result.loss, logprobs)
        return result.loss.item(), gradient.tolist(), {**result.statistics.means(), **result.statistics.largest()}

    loss, gradient, statistics = run(bad)
    clean_loss, clean_gradient, clean_statistics = run(-1.0)
    assert math.isfinite(loss) and loss == clean_loss
    assert gradient == clean_gradient and gradient[1] == gradient[3] == 0.0
    assert statistics == clean_statistics
    assert statistics["policy/entropy"] == (3.0, 2.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_a_log_ratio_of_a_thousand_at_a_trained_target_stays_finite(log_ratio, advantage):
    """exp(1000) is inf, and min() would send 0 x inf = NaN back through the branch that was not taken."""
    logprobs = torch.tensor([log_ratio - 1.0, -1.0], requires_grad=True)
    result = policy_loss(
        logprobs,
        advantages=torch.tensor([advantage, 1.0]),
        loss_mask=torch.ones(2),
        weights=torch.tensor([0.5, 0.5]),
        clip=CLIP,
        kl=KlSection(coefficient=0.1),
        old_logprobs=torch.tensor([-1.0, -1.0]),
        reference_logprobs=torch.tensor([-1.0, -1.0]),
    )
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    assert math.isfinite(result.loss.item()) and torch.isfinite(gradient).all()
    assert gradient[1].item() == -0.5


def test_nan_at_a_trained_target_is_seen():
    logprobs = torch.tensor([math.nan, -1.0], requires_grad=True)
    result = policy_loss(
        logprobs,
        advantages=torch.ones(2),
        loss_mask=torch.ones(2),
        weights=torch.tensor([0.5, 0.5]),
        clip=CLIP,
        kl=NO_KL,
        old_logprobs=torch.tensor([-1.0, -1.0]),
    )
    assert math.isnan(result.loss.item())
    assert math.isnan(result.statistics.largest()["policy/ratio_max"])


@pytest.mark.parametrize("num_targets", [0, 3])
def test_a_micro_batch_without_trained_targets_gives_zero_with_a_gradient_of_zero(num_targets):
    """A padding micro-batch still runs backward, so that its rank takes part in every collective."""
    logprobs = torch.full((num_targets,), math.nan, requires_grad=True)
    zeros = torch.zeros(num_targets)
    weights = loss_weights(
        zeros, rollout_ids=zeros.to(torch.int32), loss_mean="sequence", num_loss_tokens=5, num_loss_rollouts=2
    )
    result = policy_loss(logprobs, advantages=zeros, loss_mask=zeros, weights=weights, clip=CLIP, kl=NO_KL)
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert logprobs.grad.tolist() == [0.0] * num_targets
    assert result.statistics.means() == {} and result.statistics.largest() == {}


def test_half_precision_logprobs_are_refused():
    with pytest.raises(AssertionError, match="bfloat16"):
        policy_loss(
            torch.zeros(1, dtype=torch.bfloat16),
            advantages=torch.ones(1),
            loss_mask=torch.ones(1),
            weights=torch.ones(1),
            clip=CLIP,
            kl=NO_KL,
        )
