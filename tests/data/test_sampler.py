"""The order of prompts: complete, without repetition, and the same after a restart at any point."""

from collections import Counter

import pytest

from grpo_megatron.batch import Prompt, RewardSpec
from grpo_megatron.data.prompts import PromptSet
from grpo_megatron.data.sampler import PromptSampler

pytestmark = pytest.mark.unit


def make_set(num_prompts: int, *, answer: int = 0) -> PromptSet:
    prompts = [Prompt(f"p{i}", (i + 1,), "", RewardSpec("number", answer)) for i in range(num_prompts)]
    return PromptSet(tuple(prompts), num_too_long=0)


def draw(sampler: PromptSampler, batch_size: int, num_batches: int) -> list[list[str]]:
    return [[prompt.id for prompt in sampler.next(batch_size)] for _ in range(num_batches)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 7])
def test_every_epoch_has_every_prompt_once_and_no_batch_has_one_twice(batch_size: int) -> None:
    """35 batches of any size are whole epochs of 7, so every prompt was drawn equally often."""
    sampler = PromptSampler(make_set(7), seed=1)
    batches = draw(sampler, batch_size, 35)
    assert all(len(set(batch)) == batch_size for batch in batches)
    assert Counter(name for batch in batches for name in batch) == {f"p{i}": 5 * batch_size for i in range(7)}
    for num_batches in range(1, 35):
        counts = Counter(name for batch in batches[:num_batches] for name in batch)
        assert max(counts.values()) - min(counts.get(f"p{i}", 0) for i in range(7)) <= 2


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_size", [3, 7, 10])
def test_a_restart_at_any_point_goes_on_with_the_very_next_prompt(batch_size: int, shuffle: bool) -> None:
    """Prompts 1 to 2N with and without restart, the end of an epoch (batch sizes 7 and 10 hit it) included."""
    prompts = make_set(10 if batch_size == 10 else 7)
    undisturbed = draw(PromptSampler(prompts, seed=3, shuffle=shuffle), batch_size, 12)
    for stop in range(13):
        first = PromptSampler(prompts, seed=3, shuffle=shuffle)
        before = draw(first, batch_size, stop)
        second = PromptSampler(prompts, seed=3, shuffle=shuffle)
        second.load_state_dict(first.state_dict())
        assert second.epoch == first.epoch
        assert before + draw(second, batch_size, 12 - stop) == undisturbed


def test_epochs_and_seeds_have_orders_of_their_own_and_file_order_can_be_kept() -> None:
    prompts = make_set(20)
    first, second = draw(PromptSampler(prompts, seed=1), 20, 2)
    assert first != second and sorted(first) == sorted(second)
    assert draw(PromptSampler(prompts, seed=1), 20, 1) == [first]
    assert draw(PromptSampler(prompts, seed=2), 20, 1) != [first]
    assert draw(PromptSampler(prompts, seed=1, shuffle=False), 20, 2) == [[f"p{i}" for i in range(20)]] * 2


def test_the_shuffled_order_is_pinned() -> None:
    """Another order would change every run that is resumed with a newer version of this program."""
    assert draw(PromptSampler(make_set(6), seed=0), 6, 1) == [["p5", "p4", "p2", "p1", "p3", "p0"]]


def test_the_order_depends_on_ids_and_not_on_where_prompts_stand_in_the_file() -> None:
    prompts = make_set(9)
    reordered = PromptSet(prompts.prompts[::-1], num_too_long=0)
    assert draw(PromptSampler(prompts, seed=5), 4, 9) == draw(PromptSampler(reordered, seed=5), 4, 9)


def test_the_epoch_counts_whole_passes() -> None:
    sampler = PromptSampler(make_set(4), seed=0)
    epochs = []
    for _ in range(5):
        epochs.append(sampler.epoch)
        sampler.next(2)
    assert epochs == [0, 0, 1, 1, 2]


def test_a_batch_larger_than_the_set_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"modules.rollout.batch_size: 5 .* has 4; set it to 4 or less"):
        PromptSampler(make_set(4), seed=0).next(5)


def test_changed_prompts_are_noticed_and_the_choice_is_told() -> None:
    state = PromptSampler(make_set(4), seed=0).state_dict()
    with pytest.raises(ValueError, match=r"data.prompts: .* put back what was there, or start anew under another run"):
        PromptSampler(make_set(4, answer=1), seed=0).load_state_dict(state)
    with pytest.raises(ValueError, match="run.seed: 1, and the checkpoint was made with 0"):
        PromptSampler(make_set(4), seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="data.shuffle: False"):
        PromptSampler(make_set(4), seed=0, shuffle=False).load_state_dict(state)
