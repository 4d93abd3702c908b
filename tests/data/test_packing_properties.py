"""Packing: what holds for every input."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.batch import FinishReason, MicroBatch, ScoredRollout
from grpo_megatron.data.packing import PackingSettings, pack, pack_replica
from tests.data.scored_rollouts import make_prompt, make_scored

pytestmark = pytest.mark.unit


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[ScoredRollout], list[float | None]]:
    scored = []
    advantages: list[float | None] = []
    for group in range(draw(st.integers(0, 6))):
        prompt = make_prompt(f"p{group}", tuple(range(100 * group, 100 * group + draw(st.integers(1, 12)))))
        for index in range(draw(st.integers(1, 5))):
            length = draw(st.integers(0, 25))
            mask = tuple(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
            tokens = tuple(1000 * group + 100 * index + i for i in range(length))
            finish: FinishReason = draw(st.sampled_from(["stop", "length"]))
            scored.append(make_scored(prompt, index, tokens, loss_mask=mask, finish=finish))
            advantages.append(draw(st.one_of(st.none(), st.just(0.25 * index + group))))
    return scored, advantages


packing_settings = st.builds(
    PackingSettings,
    num_replicas=st.integers(1, 4),
    num_mini_batches=st.integers(1, 3),
    micro_batch_tokens=st.integers(8, 60),
    share_prefix=st.booleans(),
    pad_to_multiple=st.sampled_from([1, 2, 4, 8]),
)


def expected_targets(
    scored: list[ScoredRollout], advantages: list[float | None], options: PackingSettings
) -> Counter[tuple[int, int, float, float]]:
    """(rollout id, token, advantage, engine log-prob) of every token that has to be trained, straight from the rule."""
    expected: Counter[tuple[int, int, float, float]] = Counter()
    for rollout_id, (one, advantage) in enumerate(zip(scored, advantages, strict=True)):
        rollout = one.rollout
        if advantage is None:
            continue
        for token, logprob, trained in zip(rollout.token_ids, rollout.logprobs, rollout.loss_mask, strict=True):
            expected[rollout_id, token, advantage, logprob] += trained
    return +expected


@settings(max_examples=40, deadline=None)
@given(steps(), packing_settings)
def test_every_trained_token_is_a_target_exactly_once(
    step: tuple[list[ScoredRollout], list[float | None]], options: PackingSettings
) -> None:
    scored, advantages = step
    expected = expected_targets(scored, advantages, options)
    found: Counter[tuple[int, int, float, float]] = Counter()
    num_loss_tokens = num_loss_rollouts = 0
    batches = pack(scored, advantages, settings=options)
    for mini_batches in zip(*(batch.mini_batches for batch in batches), strict=True):
        targets_here: Counter[tuple[int, int, float, float]] = Counter()
        for mini_batch in mini_batches:
            for micro in mini_batch.micro_batches:
                columns = (micro.rollout_ids, micro.target_ids, micro.advantages, micro.rollout_logprobs)
                targets_here.update(zip(*(column.tolist() for column in columns), strict=True))
                assert (micro.loss_mask == 1).all()
        counts = {(each.num_loss_tokens, each.num_loss_rollouts) for each in mini_batches}
        assert counts == {(targets_here.total(), len({rollout_id for rollout_id, *_ in targets_here}))}
        num_loss_tokens += mini_batches[0].num_loss_tokens
        num_loss_rollouts += mini_batches[0].num_loss_rollouts
        found.update(targets_here)
    assert found == expected
    assert num_loss_rollouts == batches[0].num_rollouts
    assert batches[0].num_rollouts + sum(batches[0].num_dropped.values()) == len(scored)


@settings(max_examples=40, deadline=None)
@given(steps(), packing_settings)
def test_rows_obey_budget_padding_and_layout(
    step: tuple[list[ScoredRollout], list[float | None]], options: PackingSettings
) -> None:
    scored, advantages = step
    batches = pack(scored, advantages, settings=options)
    for mini_batches in zip(*(batch.mini_batches for batch in batches), strict=True):
        assert len({len(each.micro_batches) for each in mini_batches}) == 1
        for mini_batch in mini_batches:
            for micro in mini_batch.micro_batches:
                check_row(micro, scored, options)


def check_row(micro: MicroBatch, scored: list[ScoredRollout], options: PackingSettings) -> None:
    assert micro.num_tokens % options.pad_to_multiple == 0 and micro.num_tokens > 0
    ids = {int(i) for i in micro.rollout_ids}
    if micro.num_tokens > options.micro_batch_tokens:
        assert len(ids) == 1
    assert (np.diff(micro.block_ids) >= 0).all() and micro.block_ids[0] == 0
    for rollout_id in ids:
        one = scored[rollout_id]
        sources = micro.target_sources[micro.rollout_ids == rollout_id]
        targets = micro.target_ids[micro.rollout_ids == rollout_id]
        block = micro.block_ids == micro.block_ids[sources[0]]
        in_prompt = block & (micro.segment_ids == 0)
        assert tuple(micro.token_ids[in_prompt]) == one.prompt.token_ids
        assert micro.position_ids[in_prompt].tolist() == list(range(len(one.prompt.token_ids)))
        segments = {int(s) for s in micro.segment_ids[block]} - {0}
        own = [s for s in segments if tuple(micro.token_ids[block & (micro.segment_ids == s)]) == one.rollout.token_ids]
        assert len(own) == 1, "the whole answer stands in one segment of the prompt's block"
        rows = np.flatnonzero(block & (micro.segment_ids == own[0]))
        start = len(one.prompt.token_ids)
        assert micro.position_ids[rows].tolist() == list(range(start, start + one.rollout.num_tokens))
        before = [int(np.flatnonzero(in_prompt)[-1]), *rows[:-1].tolist()]
        mask = one.rollout.loss_mask
        assert sources.tolist() == [row for row, trained in zip(before, mask, strict=True) if trained]
        assert targets.tolist() == [t for t, trained in zip(one.rollout.token_ids, mask, strict=True) if trained]
        assert options.share_prefix or len(segments) == 1


@settings(max_examples=20, deadline=None)
@given(steps(), packing_settings, st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_nothing_but_the_numbering(
    step: tuple[list[ScoredRollout], list[float | None]], options: PackingSettings, generator: random.Random
) -> None:
    scored, advantages = step
    order = list(range(len(scored)))
    generator.shuffle(order)
    batches = pack(scored, advantages, settings=options)
    shuffled = pack([scored[i] for i in order], [advantages[i] for i in order], settings=options)
    for one, other in zip(batches, shuffled, strict=True):
        assert (one.num_rollouts, one.num_dropped) == (other.num_rollouts, other.num_dropped)
        for mini, other_mini in zip(one.mini_batches, other.mini_batches, strict=True):
            for micro, other_micro in zip(mini.micro_batches, other_mini.micro_batches, strict=True):
                renumbered = [order[i] for i in other_micro.rollout_ids]
                assert micro.rollout_ids.tolist() == renumbered
                for name in ("token_ids", "position_ids", "block_ids", "segment_ids", "target_sources", "advantages"):
                    assert np.array_equal(getattr(micro, name), getattr(other_micro, name)), name


@settings(max_examples=20, deadline=None)
@given(steps(), packing_settings)
def test_one_replica_alone_is_what_it_is_among_all(
    step: tuple[list[ScoredRollout], list[float | None]], options: PackingSettings
) -> None:
    scored, advantages = step
    replica = options.num_replicas - 1
    alone = pack_replica(scored, advantages, replica=replica, settings=options)
    among = pack(scored, advantages, settings=options)[replica]
    for mini, other in zip(alone.mini_batches, among.mini_batches, strict=True):
        assert [m.token_ids.tolist() for m in mini.micro_batches] == [m.token_ids.tolist() for m in other.micro_batches]
