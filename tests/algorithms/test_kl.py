import pytest
import torch

from grpo_megatron.algorithms.kl import kl_loss, kl_values

pytestmark = pytest.mark.unit

ESTIMATORS = ["k1", "k2", "k3"]


def policies(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the policy, the reference and an older policy over a vocabulary of 7."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    return logits[0], logits[1], logits[0] + 0.3 * logits[2]


def exact_kl(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    difference = logits.log_softmax(-1) - reference.log_softmax(-1)
    return (logits.softmax(-1) * difference).sum()


def numerical_gradient(function, at: torch.Tensor) -> torch.Tensor:
    gradient = torch.zeros_like(at)
    for i in range(at.numel()):
        step = torch.zeros_like(at)
        step[i] = 1e-6
        gradient[i] = (function(at + step) - function(at - step)) / 2e-6
    return gradient


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.0, 1.0, -1.0]), ("k2", [0.0, 0.5, 0.5]), ("k3", [0.0, 0.36787944, 0.71828183])],
)
def test_values_by_hand(estimator, expected):
    """d = 0, 1, -1; k3 = exp(-d) + d - 1 = 1/e and e - 2."""
    difference = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    assert kl_values(difference, estimator).tolist() == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator):
    """The mean over the policy's own tokens, taken exactly by enumerating the vocabulary, is the divergence."""
    logits, reference, _ = policies()
    difference = logits.log_softmax(-1) - reference.log_softmax(-1)
    mean = (logits.softmax(-1) * kl_values(difference, estimator)).sum()
    assert mean.item() == pytest.approx(exact_kl(logits, reference).item(), rel=1e-12)


def expected_loss_gradient(estimator: str, logits: torch.Tensor, reference: torch.Tensor, sampled_by: torch.Tensor):
    """Gradient of the mean of kl_loss over all tokens that `sampled_by` would draw, enumerated and not sampled."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    difference = logprobs - reference.log_softmax(-1)
    ratio = (logprobs - sampled_by.log_softmax(-1)).exp()
    losses = kl_loss(logprobs, log_difference=difference, ratio=ratio, estimator=estimator)
    (gradient,) = torch.autograd.grad((sampled_by.softmax(-1) * losses).sum(), logits)
    return gradient


@pytest.mark.parametrize("sampled_by", ["policy", "older policy"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_expected_gradient_of_each_estimator_is_that_of_the_reverse_divergence(estimator, sampled_by):
    """E_old[ratio d grad log p] = grad KL(policy || reference), against finite differences of the exact divergence.

    Also where the tokens come from an older policy, as in the second mini-batch of a step. Not tested: the mean over
    whole sequences, where the estimate per token leaves out how a token changes later ones.
    """
    logits, reference, older = policies()
    truth = numerical_gradient(lambda at: exact_kl(at, reference), logits)
    gradient = expected_loss_gradient(estimator, logits, reference, logits if sampled_by == "policy" else older)
    assert truth.abs().max() > 0.1
    assert torch.allclose(gradient, truth, atol=1e-8)


def test_differentiating_the_estimators_as_they_are_would_be_wrong():
    """Why kl_loss exists: the plain k1 has mean gradient 0, the plain k3 that of KL(reference || policy)."""
    logits, reference, _ = policies()
    truth = numerical_gradient(lambda at: exact_kl(at, reference), logits)
    forward = numerical_gradient(lambda at: exact_kl(reference, at), logits)

    def plain(estimator: str) -> torch.Tensor:
        at = logits.clone().requires_grad_()
        values = kl_values(at.log_softmax(-1) - reference.log_softmax(-1), estimator)
        return torch.autograd.grad((logits.softmax(-1) * values).sum(), at)[0]

    assert plain("k1").abs().max() < 1e-12
    assert torch.allclose(plain("k3"), forward, atol=1e-8)
    assert not torch.allclose(plain("k3"), truth, atol=1e-2)
    assert torch.allclose(plain("k2"), truth, atol=1e-8)


@pytest.mark.parametrize(("estimator", "left_out"), [("k1", 1.0), ("k2", 0.0), ("k3", 0.0)])
def test_gradient_per_token_is_the_numerical_derivative_of_the_value(estimator, left_out):
    """Off-policy, token by token: d(ratio k)/d logprob by finite differences; k2 with the ratio held constant.

    For k1 the score function ratio x 1, whose mean is 0, is left out on purpose.
    """
    logprobs = torch.tensor([-0.2, -1.5, -4.0, -0.9], dtype=torch.float64)
    reference = torch.tensor([-0.5, -1.0, -0.3, -0.9], dtype=torch.float64)
    old = torch.tensor([-0.4, -1.4, -3.0, -0.9], dtype=torch.float64)
    fixed_ratio = (logprobs - old).exp()

    def value(at: torch.Tensor) -> torch.Tensor:
        ratio = fixed_ratio if estimator == "k2" else (at - old).exp()
        return kl_loss(at, log_difference=at - reference, ratio=ratio, estimator=estimator)

    numerical = (value(logprobs + 1e-6) - value(logprobs - 1e-6)) / 2e-6
    leaf = logprobs.clone().requires_grad_()
    losses = kl_loss(leaf, log_difference=leaf - reference, ratio=fixed_ratio, estimator=estimator)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    assert torch.allclose(gradient, numerical - left_out * fixed_ratio, atol=1e-8)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_far_from_the_reference_value_and_gradient_stay_finite(estimator):
    leaf = torch.tensor([-1000.0, -0.1], requires_grad=True)
    difference = torch.tensor([-999.0, 999.0])
    losses = kl_loss(leaf, log_difference=difference, ratio=torch.ones(2), estimator=estimator)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    assert torch.isfinite(losses).all()
    assert gradient.tolist() == [-999.0, 999.0]
