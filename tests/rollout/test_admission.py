"""Continuous batching as bookkeeping: who starts when, what a step computes, whose blocks are shared."""

import pytest

from grpo_megatron.rollout.megatron.admission import Admission, Limits
from grpo_megatron.rollout.megatron.rows import StepPlan
from tests.rollout.requests import make_prompt, make_request

pytestmark = pytest.mark.unit


def _admission(*, rows: int = 4, blocks: int = 100, block: int = 4, budget: int = 64, share: bool = True) -> Admission:
    return Admission(Limits(rows, 64, block, blocks, budget, share))


def _request(name: str, length: int, count: int = 1, new_tokens: int = 3):  # noqa: ANN202
    return make_request(make_prompt(name, range(10, 10 + length)), count, max_new_tokens=new_tokens)


def _names(plan: StepPlan) -> list[str]:
    return [f"{row.request.prompt.id}{row.index}" for row, _ in plan.drawn_rows]


def _advance(admission: Admission, plan: StepPlan) -> None:
    admission.advance(plan)
    for row, _ in plan.drawn_rows:
        row.append(99, -1.0, 0)


def test_a_group_starts_from_one_prompt_and_draws_from_one_row_of_logits() -> None:
    admission = _admission()
    admission.enqueue([_request("a", 6, 3), _request("b", 6)])
    plan = admission.plan()
    assert plan.num_tokens == 12 and plan.num_logit_rows == 2
    assert [(row.index, place) for row, place in plan.drawn_rows] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    _advance(admission, plan)
    plan = admission.plan()
    assert plan.num_tokens == 4 and not plan.prompts
    assert [row.num_cached for row in plan.decode] == [6] * 4


def test_full_blocks_of_the_prompt_are_shared_and_the_last_one_is_copied() -> None:
    """Prompt of 6 in blocks of 4: block 0 is full and shared, block 1 holds tokens 4 and 5 and the answer."""
    admission = _admission()
    admission.enqueue([_request("a", 6, 3)])
    plan = admission.plan()
    first, second, third = plan.prompts[0].rows
    assert first.blocks[0] == second.blocks[0] == third.blocks[0]
    assert len({first.blocks[1], second.blocks[1], third.blocks[1]}) == 3
    assert plan.copies_after.sources == (first.blocks[1],) * 2
    assert plan.copies_after.destinations == (second.blocks[1], third.blocks[1])
    # 6 + 3 tokens, of which the last is never cached: 2 blocks each, one of them shared.
    assert admission.pool.num_free == 100 - 4


def test_a_prompt_that_fills_its_blocks_shares_all_but_the_block_of_its_last_token() -> None:
    admission = _admission()
    admission.enqueue([_request("a", 8, 2)])
    first, second = admission.plan().prompts[0].rows
    assert first.blocks[0] == second.blocks[0] and first.blocks[1] != second.blocks[1]


def test_members_that_start_later_join_a_running_sibling_without_its_prompt() -> None:
    admission = _admission(rows=2)
    admission.enqueue([_request("a", 6, 3)])
    plan = admission.plan()
    _advance(admission, plan)
    early = plan.drawn_rows[0][0]
    admission.finish([early])
    plan = admission.plan()
    assert not plan.prompts
    running, joined = plan.decode
    assert (joined.index, joined.num_cached, joined.next_token) == (2, 5, 15)  # the prompt's last token once more
    assert joined.blocks[0] == running.blocks[0]
    assert plan.copies_before.sources == (running.blocks[1],)
    assert plan.copies_before.destinations == (joined.blocks[1],)


def test_joining_copies_nothing_if_the_last_prompt_token_begins_a_block() -> None:
    admission = _admission(rows=1)
    admission.enqueue([_request("a", 5, 2)])
    plan = admission.plan()
    _advance(admission, plan)
    admission.limits = Limits(2, 64, 4, 100, 64, True)
    plan = admission.plan()
    assert plan.decode[1].num_cached == 4 and plan.copies_before.sources == ()


def test_the_prompt_is_computed_again_if_no_member_is_left() -> None:
    admission = _admission(rows=1)
    admission.enqueue([_request("a", 6, 2)])
    for index in range(2):
        plan = admission.plan()
        assert plan.num_tokens == 6 and _names(plan) == [f"a{index}"]
        _advance(admission, plan)
        admission.finish(admission.running)


def test_without_sharing_every_member_has_a_prompt_of_its_own() -> None:
    admission = _admission(share=False)
    admission.enqueue([_request("a", 6, 3)])
    plan = admission.plan()
    assert plan.num_tokens == 18 and not plan.copies_after.sources


def test_an_answer_starts_only_when_blocks_for_its_whole_length_are_there() -> None:
    """2 + 10 - 1 = 11 tokens are 3 blocks: of 7 blocks two answers can have them, and no running one is ever paused."""
    admission = _admission(blocks=7)
    admission.enqueue([_request(name, 2, new_tokens=10) for name in "abc"])
    plan = admission.plan()
    assert _names(plan) == ["a0", "b0"] and admission.num_free_rows == 0
    _advance(admission, plan)
    assert _names(admission.plan()) == ["a0", "b0"]
    admission.finish(admission.running[:1])
    assert _names(admission.plan()) == ["b0", "c0"]


def test_a_step_computes_prompts_up_to_its_budget_but_at_least_one() -> None:
    admission = _admission(rows=10, budget=12)
    admission.enqueue([_request("a", 40), _request("b", 6), _request("c", 6), _request("d", 6)])
    sizes = []
    while (plan := admission.plan()).prompts:
        sizes.append([len(prompt.token_ids) for prompt in plan.prompts])
        _advance(admission, plan)
    assert sizes == [[40], [6, 6], [6]]


def test_prompts_of_one_step_are_ordered_by_length() -> None:
    admission = _admission()
    admission.enqueue([_request("a", 9), _request("b", 3), _request("c", 9)])
    assert [prompt.rows[0].request.prompt.id for prompt in admission.plan().prompts] == ["b", "a", "c"]


def test_abort_takes_running_and_waiting_members_and_gives_their_blocks_back() -> None:
    admission = _admission(rows=2)
    requests = [_request("a", 6, 3), _request("b", 6)]
    admission.enqueue(requests)
    _advance(admission, admission.plan())
    stopped = admission.abort([requests[0].id])
    assert [(row.index, len(row.token_ids)) for row in stopped] == [(0, 1), (1, 1), (2, 0)]
    assert admission.pool.num_free == 100
    assert _names(admission.plan()) == ["b0"]
    assert len(admission.abort_all()) == 1 and admission.is_idle


def test_the_same_input_gives_the_same_plan() -> None:
    def history() -> list[tuple]:
        admission, steps = _admission(rows=3, blocks=20), []
        admission.enqueue([_request("a", 6, 4), _request("b", 3, 2), _request("c", 17)])
        while (plan := admission.plan()) is not None:
            steps.append((_names(plan), [tuple(row.blocks) for row, _ in plan.drawn_rows], plan.copies_before))
            _advance(admission, plan)
            admission.finish([row for row, _ in plan.drawn_rows if row.finish_reason])
        return steps

    first = history()
    assert first == history()
    assert {name for names, *_ in first for name in names} == {"a0", "a1", "a2", "a3", "b0", "b1", "c0"}


def test_what_can_never_fit_is_refused_with_the_setting_to_change() -> None:
    admission = _admission(blocks=5)
    with pytest.raises(ValueError, match="prompt a: 50 prompt tokens .* 15 are 65, .* 64; lower"):
        admission.check(_request("a", 50, new_tokens=15))
    with pytest.raises(ValueError, match="prompt b: its 30 tokens need 8 blocks of 4 tokens.*has 5"):
        admission.check(_request("b", 20, new_tokens=10))
    with pytest.raises(ValueError, match="prompt c has no tokens"):
        admission.check(_request("c", 0))
    admission.check(_request("d", 10, new_tokens=10))
