"""Packing, by hand."""

import random
from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.batch import FinishReason, MicroBatch, TrainBatch
from grpo_megatron.data.balance import first_fit
from grpo_megatron.data.packing import PackingSettings, pack, split_by_rollout
from tests.data.scored_rollouts import make_prompt, make_scored

pytestmark = pytest.mark.unit

ONE = PackingSettings(num_replicas=1, num_mini_batches=1, micro_batch_tokens=1000)


def only(batch: TrainBatch) -> MicroBatch:
    (mini_batch,) = batch.mini_batches
    (micro_batch,) = mini_batch.micro_batches
    return micro_batch


def test_two_answers_share_their_prompt_as_in_the_record_s_example() -> None:
    prompt = make_prompt("p", (5, 6))
    scored = [make_scored(prompt, 0, (7, 2), reference=True), make_scored(prompt, 1, (8,), reference=True)]
    (batch,) = pack(scored, [0.5, -0.5], settings=ONE)
    micro_batch = only(batch)
    assert micro_batch.token_ids.tolist() == [5, 6, 7, 2, 8]
    assert micro_batch.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert micro_batch.block_ids.tolist() == [0, 0, 0, 0, 0]
    assert micro_batch.segment_ids.tolist() == [0, 0, 1, 1, 2]
    assert micro_batch.target_sources.tolist() == [1, 2, 1]
    assert micro_batch.target_ids.tolist() == [7, 2, 8]
    assert micro_batch.loss_mask.tolist() == [1, 1, 1]
    assert micro_batch.advantages.tolist() == [0.5, 0.5, -0.5]
    assert micro_batch.rollout_logprobs.tolist() == [-0.125, -0.25, -0.125]
    assert micro_batch.reference_logprobs is not None
    assert micro_batch.reference_logprobs.tolist() == [-0.25, -0.5, -0.25]
    assert micro_batch.proximal_logprobs is None
    assert micro_batch.rollout_ids.tolist() == [0, 0, 1]
    assert (batch.mini_batches[0].num_loss_tokens, batch.mini_batches[0].num_loss_rollouts) == (3, 2)
    kinds = {name: str(value.dtype) for name, value in vars(micro_batch).items() if value is not None}
    assert kinds == {
        "token_ids": "int64",
        "position_ids": "int64",
        "block_ids": "int32",
        "segment_ids": "int32",
        "target_sources": "int64",
        "target_ids": "int64",
        "loss_mask": "float32",
        "advantages": "float32",
        "rollout_logprobs": "float32",
        "reference_logprobs": "float32",
        "rollout_ids": "int32",
    }


def test_without_a_shared_prefix_every_answer_has_its_own_prompt() -> None:
    prompt = make_prompt("p", (5, 6))
    scored = [make_scored(prompt, 0, (7, 2)), make_scored(prompt, 1, (8,))]
    micro_batch = only(pack(scored, [0.5, -0.5], settings=replace(ONE, share_prefix=False))[0])
    assert micro_batch.token_ids.tolist() == [5, 6, 7, 2, 5, 6, 8]
    assert micro_batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert micro_batch.block_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert micro_batch.segment_ids.tolist() == [0, 0, 1, 1, 0, 0, 1]
    assert micro_batch.target_sources.tolist() == [1, 2, 5]


def test_thirteen_tokens_are_padded_to_a_multiple_of_four_in_a_block_without_targets() -> None:
    prompt = make_prompt("p", tuple(range(10, 20)))
    micro_batch = only(
        pack([make_scored(prompt, 0, (1, 2, 3))], [1.0], settings=replace(ONE, pad_to_multiple=4, pad_token_id=9))[0]
    )
    assert micro_batch.num_tokens == 16
    assert micro_batch.block_ids.tolist() == [0] * 13 + [1] * 3
    assert micro_batch.token_ids[13:].tolist() == [9, 9, 9]
    assert micro_batch.position_ids[13:].tolist() == [0, 1, 2]
    assert micro_batch.target_sources.tolist() == [9, 10, 11]


def test_three_sequences_that_fill_the_budget_exactly_are_one_micro_batch() -> None:
    scored = [make_scored(make_prompt(name, (1, 1)), 0, (3,) * 6) for name in "abc"]
    (batch,) = pack(scored, [1.0, 1.0, 1.0], settings=replace(ONE, micro_batch_tokens=24))
    assert only(batch).num_tokens == 24


def test_the_first_token_of_a_one_token_answer_is_predicted_by_the_end_of_the_prompt() -> None:
    micro_batch = only(pack([make_scored(make_prompt("p", (5, 6, 7)), 0, (2,))], [1.0], settings=ONE)[0])
    assert micro_batch.target_sources.tolist() == [2]
    assert micro_batch.target_ids.tolist() == [2]


def test_a_token_that_a_tool_wrote_is_read_but_is_no_target() -> None:
    prompt = make_prompt("p", (5,))
    micro_batch = only(
        pack([make_scored(prompt, 0, (7, 8, 9, 2), loss_mask=(True, False, False, True))], [1.0], settings=ONE)[0]
    )
    assert micro_batch.token_ids.tolist() == [5, 7, 8, 9, 2]
    assert micro_batch.target_ids.tolist() == [7, 2]
    assert micro_batch.target_sources.tolist() == [0, 3]
    assert micro_batch.rollout_logprobs.tolist() == [-0.125, -0.5]


def test_the_end_token_is_trained_where_the_policy_wrote_it_and_invented_nowhere() -> None:
    """The padding token is the end token, one answer ended and one was cut off."""
    prompt = make_prompt("p", (5,))
    scored = [make_scored(prompt, 0, (7, 2)), make_scored(prompt, 1, (7, 7), finish="length")]
    micro_batch = only(pack(scored, [1.0, -1.0], settings=replace(ONE, pad_to_multiple=8, pad_token_id=2))[0])
    assert micro_batch.target_ids.tolist() == [7, 2, 7, 7]
    assert micro_batch.token_ids.tolist() == [5, 7, 2, 7, 7, 2, 2, 2]


def test_answers_that_are_left_out_are_in_no_denominator() -> None:
    prompt = make_prompt("p", (5,))
    finishes: list[FinishReason] = ["stop", "length", "stop", "length"]
    scored = [make_scored(prompt, i, (7,) * (i + 1), finish=finish) for i, finish in enumerate(finishes)]
    reasons = [None if finish == "stop" else "truncated" for finish in finishes]
    advantages = [1.0 if reason is None else None for reason in reasons]
    (masked,) = pack(scored, advantages, settings=ONE, drop_reasons=reasons)
    (kept,) = pack(scored, [1.0] * 4, settings=ONE)
    assert (masked.mini_batches[0].num_loss_tokens, masked.mini_batches[0].num_loss_rollouts) == (1 + 3, 2)
    assert (kept.mini_batches[0].num_loss_tokens, kept.mini_batches[0].num_loss_rollouts) == (1 + 2 + 3 + 4, 4)
    assert masked.num_dropped == {"truncated": 2} and masked.num_rollouts == 2
    assert only(masked).token_ids.tolist() == [5, 7, 7, 7, 7]


def test_what_is_not_trained_is_counted_by_reason() -> None:
    prompt = make_prompt("p", (5,))
    scored = [
        make_scored(prompt, 0, (7,)),
        make_scored(prompt, 1, (7,), score=None),
        make_scored(prompt, 2, (7,)),
        make_scored(prompt, 3, (7,), finish="abort"),
        make_scored(prompt, 4, (7, 8), loss_mask=(False, False)),
    ]
    (batch,) = pack(scored, [1.0, None, None, None, 1.0], settings=ONE, drop_reasons=[None, None, None, "stale", None])
    assert batch.num_dropped == {"no_signal": 1, "no_trained_tokens": 1, "reward_error": 1, "stale": 1}
    assert batch.num_rollouts == 1


def test_lengths_of_1_and_99_on_two_ranks_have_one_denominator_and_equally_many_micro_batches() -> None:
    scored = [make_scored(make_prompt("a", (5,)), 0, (7,)), make_scored(make_prompt("b", (5,)), 0, (7,) * 99)]
    batches = pack(scored, [1.0, 1.0], settings=replace(ONE, num_replicas=2))
    assert [batch.mini_batches[0].num_loss_tokens for batch in batches] == [100, 100]
    assert sorted(only(batch).num_targets for batch in batches) == [1, 99]


def test_a_rank_without_any_answer_gets_padding_without_targets() -> None:
    scored = [make_scored(make_prompt("a", (5,)), 0, (7, 2))]
    batches = pack(scored, [1.0], settings=replace(ONE, num_replicas=2, pad_to_multiple=4))
    empty = only(batches[1])
    assert (empty.num_tokens, empty.num_targets) == (4, 0)
    assert batches[1].mini_batches[0].num_loss_tokens == 2


def test_a_mini_batch_without_anything_to_train_is_padding_and_has_no_loss_tokens() -> None:
    scored = [make_scored(make_prompt("a", (5,)), 0, (7, 2))]
    (batch,) = pack(scored, [1.0], settings=replace(ONE, num_mini_batches=3))
    assert [each.num_loss_tokens for each in batch.mini_batches] == [2, 0, 0]
    assert [len(each.micro_batches) for each in batch.mini_batches] == [1, 1, 1]
    assert batch.mini_batches[1].micro_batches[0].num_targets == 0


def test_mini_batches_keep_groups_whole_and_equal_in_number() -> None:
    scored = [make_scored(make_prompt(f"p{i}", (5,)), j, (7, 2)) for i in range(7) for j in range(3)]
    (batch,) = pack(scored, [1.0] * len(scored), settings=replace(ONE, num_mini_batches=3))
    groups = []
    for mini_batch in batch.mini_batches:
        ids = {int(i) for micro in mini_batch.micro_batches for i in micro.rollout_ids}
        groups.append({i // 3 for i in ids})
        assert len(ids) == 3 * len(groups[-1])
    assert [len(each) for each in groups] == [3, 2, 2]
    assert set.union(*groups) == set(range(7))


def test_one_large_group_is_cut_for_two_replicas() -> None:
    prompt = make_prompt("p", (5, 6))
    scored = [make_scored(prompt, i, (7,) * 10) for i in range(8)]
    first, second = pack(scored, [1.0] * 8, settings=replace(ONE, num_replicas=2))
    assert only(first).num_tokens == only(second).num_tokens == 42


def test_a_rollout_above_the_budget_has_a_micro_batch_to_itself() -> None:
    prompt = make_prompt("p", (5, 6))
    scored = [make_scored(prompt, 0, (7,) * 30), make_scored(prompt, 1, (7,) * 3), make_scored(prompt, 2, (7,) * 4)]
    (batch,) = pack(scored, [1.0] * 3, settings=replace(ONE, micro_batch_tokens=10))
    sizes = sorted(micro.num_tokens for micro in batch.mini_batches[0].micro_batches)
    assert sizes == [9, 32]


def test_a_budget_below_the_padding_is_refused_with_its_key() -> None:
    with pytest.raises(ValueError, match="modules.training.micro_batch_tokens: 3 is below 4"):
        PackingSettings(num_replicas=1, num_mini_batches=1, micro_batch_tokens=3, pad_to_multiple=4)


def test_the_same_rollout_twice_is_noticed() -> None:
    scored = [make_scored(make_prompt("p", (5,)), 0, (7,))] * 2
    with pytest.raises(AssertionError, match="an index of its group occurs twice"):
        pack(scored, [1.0, 1.0], settings=ONE)


def test_first_fit_by_hand() -> None:
    assert first_fit([5, 4, 3, 2, 9], 8) == [[0, 2], [1, 3], [4]]


def test_work_is_balanced_over_replicas() -> None:
    generator = random.Random(0)
    scored = [
        make_scored(make_prompt(f"p{i}", (1,) * 20), j, (7,) * generator.randint(1, 100))
        for i in range(8)
        for j in range(8)
    ]
    batches = pack(scored, [1.0] * 64, settings=replace(ONE, num_replicas=4, micro_batch_tokens=512))
    work = [sum(micro.num_tokens for micro in batch.mini_batches[0].micro_batches) for batch in batches]
    assert max(work) < 1.05 * sum(work) / len(work)


def test_values_at_the_targets_are_split_by_rollout() -> None:
    prompt = make_prompt("p", (5, 6))
    scored = [make_scored(prompt, 1, (7, 2)), make_scored(prompt, 0, (8,))]
    micro_batch = only(pack(scored, [1.0, 1.0], settings=ONE)[0])
    parts = split_by_rollout(micro_batch, np.array([10.0, 20.0, 21.0]))
    assert {key: part.tolist() for key, part in parts.items()} == {1: [10.0], 0: [20.0, 21.0]}
    empty = only(pack([], [], settings=ONE)[0])
    assert split_by_rollout(empty, np.zeros(0)) == {}
