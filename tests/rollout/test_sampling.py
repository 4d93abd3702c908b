"""Drawing tokens: hand-computed distributions, edges of the uniform number, truncation, log-probs."""

import math

import numpy as np
import pytest
import torch

from grpo_megatron.rollout.megatron.sampling import Draws, sample

pytestmark = pytest.mark.unit


def _draws(uniforms, *, rows=None, temperature=1.0, top_p=1.0, top_k=0, num_rows=1) -> Draws:  # noqa: ANN001
    count = len(uniforms)
    return Draws(
        rows=np.zeros(count, np.int64) if rows is None else np.array(rows, np.int64),
        uniforms=np.array(uniforms, np.float64),
        temperatures=np.full(num_rows, temperature, np.float32),
        top_p=np.full(num_rows, top_p, np.float32),
        top_k=np.full(num_rows, top_k, np.int64),
    )


def _logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def test_the_token_is_the_first_whose_cumulative_probability_exceeds_the_uniform_number() -> None:
    sampled = sample(_logits(0.5, 0.2, 0.3), _draws([0.0, 0.49, 0.51, 0.69, 0.71, 0.9999999]), vocab_size=3)
    assert sampled.token_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert sampled.logprobs == pytest.approx(np.log([0.5, 0.5, 0.2, 0.2, 0.3, 0.3]), abs=1e-6)


def test_temperature_2_takes_the_square_root_of_the_odds() -> None:
    """0.8 : 0.2 becomes 2 : 1."""
    sampled = sample(_logits(0.8, 0.2), _draws([0.66, 0.67], temperature=2.0), vocab_size=2)
    assert sampled.token_ids.tolist() == [0, 1]
    assert sampled.logprobs == pytest.approx([math.log(2 / 3), math.log(1 / 3)], abs=1e-6)


@pytest.mark.parametrize("vocab_size", [5, 256, 257, 1000, 4097])
def test_blocks_and_their_padding_change_nothing(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(1, vocab_size, generator=generator) * 3
    uniforms = np.random.default_rng(0).random(500)
    cumulative = logits[0].double().softmax(-1).cumsum(-1).numpy()
    sampled = sample(logits.clone(), _draws(uniforms), vocab_size=vocab_size)
    expected = np.searchsorted(cumulative, uniforms, side="right")
    assert (sampled.token_ids != expected).sum() <= 1  # one may lie within rounding of a border
    assert sampled.logprobs == pytest.approx(logits[0].double().log_softmax(-1)[sampled.token_ids].numpy(), abs=1e-6)


def test_a_token_without_probability_is_never_drawn_even_at_the_edges() -> None:
    logits = torch.full((1, 600), float("-inf"))
    logits[0, [10, 300, 301]] = torch.tensor([1.0, 2.0, 0.5])
    edges = [0.0, np.nextafter(0, 1), np.nextafter(1, 0), 1 - 1e-8, 0.5]
    sampled = sample(logits, _draws(edges), vocab_size=600)
    assert set(sampled.token_ids.tolist()) <= {10, 300, 301}
    assert sampled.token_ids[0] == 10 and sampled.token_ids[2] == 301
    assert np.isfinite(sampled.logprobs).all()


def test_columns_behind_the_real_vocabulary_do_not_count() -> None:
    logits = torch.tensor([[0.0, 0.0, 50.0, 50.0]])
    sampled = sample(logits, _draws([0.1, 0.9, 0.9999]), vocab_size=2)
    assert sampled.token_ids.tolist() == [0, 1, 1]
    assert sampled.logprobs == pytest.approx([math.log(0.5)] * 3)


def test_greedy_takes_the_largest_logit_and_reports_the_logprob_at_temperature_1() -> None:
    sampled = sample(_logits(0.3, 0.6, 0.1), _draws([0.99], temperature=0.0), vocab_size=3)
    assert sampled.token_ids.tolist() == [1]
    assert sampled.logprobs == pytest.approx([math.log(0.6)], abs=1e-6)


def test_rows_keep_their_own_settings_and_several_draws_share_one() -> None:
    logits = torch.tensor([[0.7, 0.3], [0.2, 0.8]]).log()
    draws = Draws(
        rows=np.array([1, 0, 1, 0]),
        uniforms=np.array([0.5, 0.75, 0.1, 0.99]),
        temperatures=np.array([1.0, 0.0], np.float32),
        top_p=np.array([0.5, 1.0], np.float32),  # leaves only the first token of row 0
        top_k=np.array([0, 0]),
    )
    sampled = sample(logits, draws, vocab_size=2)
    assert sampled.token_ids.tolist() == [1, 0, 1, 0]
    assert sampled.logprobs == pytest.approx(np.log([0.8, 0.7, 0.8, 0.7]), abs=1e-6)


def test_top_k_then_top_p_of_what_is_left() -> None:
    """Top-3 of (0.4, 0.3, 0.2, 0.1) is (4, 3, 2) / 9; the smallest set with 0.7 of it is the first two: 4/7 and 3/7."""
    uniforms = [0.5, 4 / 7 - 1e-6, 4 / 7 + 1e-6, 0.999]
    sampled = sample(_logits(0.4, 0.3, 0.2, 0.1), _draws(uniforms, top_k=3, top_p=0.7), vocab_size=4)
    assert sampled.token_ids.tolist() == [0, 0, 1, 1]
    assert sampled.logprobs == pytest.approx(np.log([0.4, 0.4, 0.3, 0.3]), abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_show_in_the_logprob(bad: float) -> None:
    logits = torch.zeros(2, 300)
    logits[1, 7] = bad
    sampled = sample(logits, _draws([0.3, 0.3], rows=[0, 1], num_rows=2), vocab_size=300)
    assert math.isfinite(sampled.logprobs[0]) and math.isnan(sampled.logprobs[1])


def test_logprobs_of_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.tensor([[30.0, 29.0, 28.0]], dtype=torch.bfloat16)
    sampled = sample(logits, _draws([0.0]), vocab_size=3)
    assert sampled.logprobs[0] == pytest.approx(-math.log(1 + math.exp(-1) + math.exp(-2)), abs=1e-6)
