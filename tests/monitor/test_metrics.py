"""Logged means, maxima and sums over ranks and micro-batches equal those computed in one piece."""

import math
import random

import pytest
import torch

from grpo_megatron.algorithms.mismatch import measure_gap
from grpo_megatron.algorithms.policy_loss import policy_loss
from grpo_megatron.config.schema import ClipSection, KlSection
from grpo_megatron.monitor import records
from grpo_megatron.monitor.metrics import Mean, MetricSums, merge, reduce_over_ranks

pytestmark = pytest.mark.unit


def test_a_mean_over_uneven_pieces_weighs_values_and_not_pieces():
    """1 value of 10 on one rank, 99 of 0 on the other: the mean is 0.1, the mean of means would be 5."""
    whole = merge([MetricSums.of_values("reward/score", [10.0]), MetricSums.of_values("reward/score", [0.0] * 99)])
    assert whole.values() == {"reward/score_mean": 0.1, "reward/score_max": 10.0, "reward/score_min": 0.0}


def test_every_kind_is_the_same_for_any_cut_and_order():
    """Bit for bit: values are multiples of 1/8, so no piece's sum is rounded."""
    generator = random.Random(0)
    values = [generator.randrange(-800, 800) / 8 for _ in range(60)]

    def piece(part: list[float]) -> MetricSums:
        return merge([MetricSums.of_values("v", part), MetricSums(sums={"s": sum(part)})])

    whole = piece(values).values()
    assert whole["v_mean"] == sum(values) / 60 and whole["v_max"] == max(values) and whole["s"] == sum(values)
    for _ in range(20):
        cuts = sorted(generator.sample(range(1, 60), 4))
        pieces = [piece(values[i:j]) for i, j in zip([0, *cuts], [*cuts, 60], strict=True)]
        generator.shuffle(pieces)
        nested = merge([merge(pieces[:2]), merge(pieces[2:])])
        assert merge(pieces).values() == whole
        assert nested.values() == whole


def test_the_order_of_many_pieces_changes_no_bit():
    pieces = [MetricSums(means={"m": Mean(1.0 / (i + 3), 1)}) for i in range(50)]
    assert merge(pieces) == merge(reversed(pieces))
    assert math.fsum(1.0 / (i + 3) for i in range(50)) == merge(pieces).means["m"].total


def test_ranks_without_numbers_of_their_own_take_part_and_nothing_counts_twice():
    own = {0: MetricSums.of_values("v", [1.0, 2.0]), 1: MetricSums(), 2: MetricSums.of_values("v", [6.0])}
    results = [reduce_over_ranks(own[rank], gather=lambda _: list(own.values())).values() for rank in own]
    assert results == [{"v_mean": 3.0, "v_max": 6.0, "v_min": 1.0}] * 3


def test_a_mean_over_nothing_is_left_out_and_not_zero():
    assert MetricSums.of_values("v", []).values() == {}
    assert MetricSums.of_shares({"gap/mean": (0.0, 0.0), "loss/total": (0.5, 1.0)}).values() == {"loss/total": 0.5}


@pytest.mark.parametrize("order", [[math.nan, 1.0], [1.0, math.nan]])
def test_nan_survives_every_reduction(order):
    """max(1.0, nan) is 1.0 in Python and min(1.0, nan) as well."""
    values = merge([MetricSums.of_values("v", [value]) for value in order]).values()
    assert all(math.isnan(value) for value in values.values()) and len(values) == 3


def test_infinities_of_both_signs_become_nan_instead_of_an_error():
    values = merge([MetricSums(sums={"s": math.inf}), MetricSums(sums={"s": -math.inf})]).values()
    assert math.isnan(values["s"])


def test_one_name_for_two_kinds_is_refused():
    with pytest.raises(AssertionError, match="two kinds"):
        MetricSums(sums={"x": 1.0}, maxima={"x": 2.0}).values()


def test_loss_statistics_of_micro_batches_are_those_of_the_whole_and_have_the_names_that_readers_look_for():
    """The way from `algorithms` to a report: 7 targets at once, and as 3 + 4, and two mini-batches average."""
    logprobs = -torch.arange(1.0, 8.0, dtype=torch.float64) / 8

    def pieces(chosen: slice) -> MetricSums:
        arguments = dict(loss_mask=torch.ones(7)[chosen])
        loss = policy_loss(
            logprobs[chosen],
            advantages=torch.tensor([1.0, -1.0, 2.0, -2.0, 1.0, 1.0, -1.0])[chosen],
            weights=torch.full((7,), 1 / 8, dtype=torch.float64)[chosen],
            clip=ClipSection(),
            kl=KlSection(coefficient=0.5),
            old_logprobs=logprobs[chosen] - 0.125,
            reference_logprobs=logprobs[chosen] - 0.25,
            entropy=logprobs[chosen].abs(),
            **arguments,
        )
        gap = measure_gap(logprobs[chosen], rollout_logprobs=logprobs[chosen] + 0.125, **arguments)
        sums = loss.statistics.joined(gap)
        return merge([MetricSums.of_shares(sums.means()), MetricSums(maxima=sums.largest())])

    whole = pieces(slice(None)).values()
    cut = merge([pieces(slice(0, 3)), pieces(slice(3, 7))]).values()
    assert cut == pytest.approx(whole, rel=1e-14)
    twice = merge([pieces(slice(None)), pieces(slice(None))]).values()
    assert twice == pytest.approx(whole, rel=1e-14)
    looked_for = [records.LOSS, records.KL_REFERENCE, records.ENTROPY, records.GAP_MEAN, records.GAP_MAX]
    assert {*looked_for, records.CLIP_LOW_SHARE, records.CLIP_HIGH_SHARE} <= whole.keys()
