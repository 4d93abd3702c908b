"""The mean over a mini-batch does not depend on how it was cut (mini-batch = the sum of its pieces)."""

import itertools
import math

import pytest
import torch

from grpo_megatron.algorithms.loss_weights import LossMean, loss_weights
from grpo_megatron.algorithms.policy_loss import policy_loss
from grpo_megatron.config.schema import ClipSection, KlSection

pytestmark = pytest.mark.unit

LENGTHS = [1, 99, 8, 3]  # trained tokens per rollout
MASK = torch.cat([torch.ones(length) for length in LENGTHS])
ROLLOUT_IDS = torch.cat([torch.full((length,), i) for i, length in enumerate(LENGTHS)])


def weights_of(indices: list[int], loss_mean: LossMean) -> torch.Tensor:
    chosen = torch.cat([(i == ROLLOUT_IDS).nonzero()[:, 0] for i in indices])
    return loss_weights(
        MASK[chosen],
        rollout_ids=ROLLOUT_IDS[chosen],
        loss_mean=loss_mean,
        num_loss_tokens=sum(LENGTHS),
        num_loss_rollouts=len(LENGTHS),
    )


def test_token_mean_weighs_every_token_alike():
    assert weights_of([0, 2], "token").tolist() == pytest.approx([1 / 111] * 9)


def test_sequence_mean_weighs_every_rollout_alike():
    assert weights_of([0, 2], "sequence").tolist() == pytest.approx([1 / 4] + [1 / 32] * 8)


def test_masked_answers_are_in_no_denominator():
    """Rollout 1 is masked out whole (truncated), rollout 0 in part: 3 tokens and 2 rollouts remain."""
    mask = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    arguments = dict(rollout_ids=torch.tensor([0, 0, 1, 1, 2, 2]), num_loss_tokens=3, num_loss_rollouts=2)
    token = loss_weights(mask, loss_mean="token", **arguments)
    sequence = loss_weights(mask, loss_mean="sequence", **arguments)
    assert token.tolist() == pytest.approx([1 / 3, 0, 0, 0, 1 / 3, 1 / 3])
    assert sequence.tolist() == [0.5, 0, 0, 0, 0.25, 0.25]
    assert token.sum().item() == pytest.approx(1.0) and sequence.sum().item() == 1.0


def test_a_rollout_split_over_pieces_needs_its_count_from_outside():
    counts = torch.tensor([4, 2])
    pieces = [
        loss_weights(
            torch.ones(3),
            rollout_ids=ids,
            loss_mean="sequence",
            num_loss_tokens=6,
            num_loss_rollouts=2,
            tokens_per_rollout=counts,
        )
        for ids in (torch.tensor([0, 0, 1]), torch.tensor([0, 0, 1]))
    ]
    assert torch.cat(pieces).tolist() == [1 / 8, 1 / 8, 1 / 4] * 2


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
def test_a_mini_batch_without_trained_tokens_has_weights_of_zero(loss_mean):
    weights = loss_weights(
        torch.zeros(2),
        rollout_ids=torch.zeros(2, dtype=torch.int32),
        loss_mean=loss_mean,
        num_loss_tokens=0,
        num_loss_rollouts=0,
    )
    assert weights.tolist() == [0.0, 0.0]


CUTS = [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 2], [1, 3]], [[3], [2], [1], [0]], [[], [1, 0], [3, 2]]]


@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
def test_loss_gradient_and_statistics_do_not_depend_on_the_cut(loss_mean):
    """Lengths 1, 99, 8, 3 in 1 to 4 micro-batches, in any order: same loss, same gradient bit for bit, same means.

    The whole is computed independently: a loop over rollouts in plain Python.
    """
    generator = torch.Generator().manual_seed(3)
    num_tokens = sum(LENGTHS)
    logprobs, old, reference = -torch.rand(3, num_tokens, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)[ROLLOUT_IDS]

    def run(cut: list[list[int]]) -> tuple[float, torch.Tensor, dict[str, list[float]]]:
        leaf = logprobs.clone().requires_grad_()
        losses, means = [], {}
        for indices in cut:
            chosen = torch.cat(
                [torch.zeros(0, dtype=torch.int64)] + [(i == ROLLOUT_IDS).nonzero()[:, 0] for i in indices]
            )
            result = policy_loss(
                leaf[chosen],
                advantages=advantages[chosen],
                loss_mask=MASK[chosen],
                weights=loss_weights(
                    MASK[chosen],
                    rollout_ids=ROLLOUT_IDS[chosen],
                    loss_mean=loss_mean,
                    num_loss_tokens=num_tokens,
                    num_loss_rollouts=len(LENGTHS),
                ).double(),
                clip=ClipSection(),
                kl=KlSection(0.2, "k3"),
                old_logprobs=old[chosen],
                reference_logprobs=reference[chosen],
            )
            losses.append(result.loss)
            for name, (total, count) in result.statistics.means().items():
                old_total, old_count = means.get(name, (0.0, 0.0))
                means[name] = (old_total + total, old_count + count)
        sum(losses).backward()
        return sum(losses).item(), leaf.grad, {name: total / count for name, (total, count) in means.items()}

    whole_loss, whole_gradient, whole_means = run(CUTS[0])
    for cut in CUTS[1:]:
        loss, gradient, means = run(cut)
        assert loss == pytest.approx(whole_loss, rel=1e-13)
        assert torch.equal(gradient, whole_gradient)
        assert means == pytest.approx(whole_means, rel=1e-13)
    assert whole_loss == pytest.approx(loss_in_plain_python(logprobs, old, reference, advantages, loss_mean), rel=1e-6)
    assert whole_means["loss/total"] == pytest.approx(whole_loss, rel=1e-6)


def loss_in_plain_python(logprobs, old, reference, advantages, loss_mean: LossMean) -> float:
    per_rollout: list[list[float]] = [[] for _ in LENGTHS]
    for i, (lp, before, ref, a) in enumerate(
        zip(logprobs.tolist(), old.tolist(), reference.tolist(), advantages.tolist(), strict=True)
    ):
        ratio = math.exp(lp - before)
        kl = math.exp(ref - lp) - (ref - lp) - 1
        surrogate = -min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
        per_rollout[int(ROLLOUT_IDS[i])].append(surrogate + 0.2 * ratio * kl)
    if loss_mean == "token":
        return sum(itertools.chain(*per_rollout)) / sum(LENGTHS)
    return sum(sum(losses) / len(losses) for losses in per_rollout) / len(LENGTHS)
