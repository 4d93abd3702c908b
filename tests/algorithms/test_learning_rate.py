import pytest

from grpo_megatron.algorithms.learning_rate import learning_rate
from grpo_megatron.config.schema import TrainingSection

pytestmark = pytest.mark.unit


def rates(num_steps: int, **fields) -> list[float]:
    section = TrainingSection(learning_rate=1.0, **fields)
    return [learning_rate(step, section, num_steps=num_steps) for step in range(num_steps)]


def test_warm_up_starts_above_zero_and_reaches_the_full_rate():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_the_minimum_in_the_last_step():
    assert rates(7, warmup_steps=2, decay="linear", minimum_learning_rate=0.2) == pytest.approx(
        [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    )


def test_cosine_decay_by_hand():
    """(1 + cos(pi x progress)) / 2 at progress 0, 1/4, 1/2, 3/4, 1."""
    assert rates(5, decay="cosine") == pytest.approx([1.0, 0.8535533906, 0.5, 0.1464466094, 0.0])


def test_steps_after_the_last_stay_at_the_minimum():
    section = TrainingSection(learning_rate=1.0, minimum_learning_rate=0.1, decay="cosine")
    assert learning_rate(99, section, num_steps=5) == pytest.approx(0.1)


def test_one_step_and_a_warm_up_longer_than_the_run_are_no_errors():
    assert rates(1, decay="linear") == [1.0]
    assert rates(2, warmup_steps=4, decay="cosine") == [0.25, 0.5]


def test_zero_stays_zero():
    section = TrainingSection(learning_rate=0.0, warmup_steps=3, decay="linear")
    assert [learning_rate(step, section, num_steps=5) for step in range(5)] == [0.0] * 5
