import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithms.advantages import SCALE_EPSILON, group_advantages

pytestmark = pytest.mark.unit

quick = settings(database=None, deadline=None, derandomize=True, max_examples=100)
group_scores = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


def test_advantages_are_score_minus_mean_over_sample_deviation():
    """Scores 1, 0, 0, 1: mean 1/2, sample variance (4 x 1/4) / 3 = 1/3."""
    result = group_advantages([("a", 1.0), ("a", 0.0), ("a", 0.0), ("a", 1.0)], scale="standard_deviation")
    expected = 0.5 / (math.sqrt(1 / 3) + SCALE_EPSILON)
    assert result.advantages == pytest.approx((expected, -expected, -expected, expected), rel=1e-15)
    assert result.has_signal == (True,) * 4
    assert result.signal_share == 1.0


def test_without_scale_advantages_are_the_differences_from_the_mean():
    result = group_advantages([("a", 3.0), ("a", 0.0), ("a", 0.0)], scale="none")
    assert result.advantages == (2.0, -1.0, -1.0)


@pytest.mark.parametrize("scale", ["standard_deviation", "none"])
def test_eight_rewards_of_a_tenth_give_exactly_zero_and_no_signal(scale):
    """A plain mean of eight 0.1 in fp32, or of three in fp64, is not 0.1: the rest divided by its own size is +-1."""
    assert sum([0.1] * 3) / 3 != 0.1
    for size in (2, 3, 8):
        result = group_advantages([("a", 0.1)] * size, scale=scale)
        assert result.advantages == (0.0,) * size
        assert result.groups_without_signal == ("a",)
        assert result.signal_share == 0.0


def test_scores_that_differ_by_rounding_only_have_no_signal():
    result = group_advantages([("a", 0.1 + 0.2), ("a", 0.3), ("b", 1e9), ("b", 1e9 + 1)], scale="standard_deviation")
    assert result.advantages == (0.0, 0.0, 0.0, 0.0)
    assert result.groups_without_signal == ("a", "b")


def test_small_but_real_differences_have_a_signal():
    result = group_advantages([("a", 0.5), ("a", 0.501)], scale="none")
    assert result.has_signal == (True, True)
    assert result.advantages == pytest.approx((-0.0005, 0.0005))


def test_members_without_score_are_outside_mean_and_deviation():
    """The group is 1, 0 whatever stands between; counted as zeros the mean would be 1/4."""
    with_failures = group_advantages([("a", 1.0), ("a", None), ("a", 0.0), ("a", None)], scale="standard_deviation")
    without = group_advantages([("a", 1.0), ("a", 0.0)], scale="standard_deviation")
    assert with_failures.advantages == (without.advantages[0], None, without.advantages[1], None)
    assert with_failures.has_signal == (True, False, True, False)
    assert with_failures.num_unscored == 2


def test_a_group_with_fewer_than_two_scores_has_no_signal():
    result = group_advantages([("a", 5.0), ("a", None), ("b", None), ("b", None)], scale="standard_deviation")
    assert result.advantages == (0.0, None, None, None)
    assert result.groups_without_signal == ("a", "b")
    assert result.num_groups == 2


def test_groups_may_be_interleaved_and_do_not_touch_each_other():
    result = group_advantages([("a", 1.0), ("b", 10.0), ("a", 0.0), ("b", 20.0), ("c", 1.0), ("c", 1.0)], scale="none")
    assert result.advantages == (0.5, -5.0, -0.5, 5.0, 0.0, 0.0)
    assert result.signal_share == pytest.approx(2 / 3)


def test_zero_is_a_score_and_not_missing():
    assert group_advantages([("a", 0.0), ("a", 2.0)], scale="none").advantages == (-1.0, 1.0)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_no_finite_number_is_refused_by_group(score):
    with pytest.raises(ValueError, match="group 'add-3-5'"):
        group_advantages([("add-3-5", 0.0), ("add-3-5", score)], scale="none")


def test_no_rollouts_is_no_error():
    result = group_advantages([], scale="standard_deviation")
    assert result.advantages == () and result.signal_share == 0.0


@quick
@given(group_scores, st.randoms(use_true_random=False))
def test_order_of_arrival_changes_no_bit(scores, random):
    order = list(range(len(scores)))
    random.shuffle(order)
    straight = group_advantages([("a", score) for score in scores], scale="standard_deviation").advantages
    shuffled = group_advantages([("a", scores[i]) for i in order], scale="standard_deviation").advantages
    assert shuffled == tuple(straight[i] for i in order)


@quick
@given(group_scores)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_scores(scores):
    advantages = group_advantages([("a", score) for score in scores], scale="standard_deviation").advantages
    assert sum(advantages) == pytest.approx(0.0, abs=1e-7)
    for i in range(len(scores) - 1):
        if advantages[i] > advantages[i + 1]:
            assert scores[i] > scores[i + 1]
    # Sample deviation of n numbers: the sum of squares of the advantages is n - 1, less what epsilon takes.
    assert sum(advantage**2 for advantage in advantages) <= (len(scores) - 1) * (1 + 1e-9)
