"""What every rollout engine must do, checked against HF transformers in float32.

A test module of an engine makes a fixture `subject` (scope module: engines may be slow to start) and inherits:

    class TestMyEngine(EngineConformance): ...

The model is `tests.tiny.make_tiny_llama`'s: 151 tokens, 2 ends.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_megatron.batch import Prompt, Rollout
from grpo_megatron.rollout.base import EngineRestarted, RolloutEngine
from grpo_megatron.rollout.dispatch import ResumedTickets, StaticTickets, collect
from tests.rollout.oracle import distributions, greedy_ids, largest_difference
from tests.rollout.requests import ListSource, by_answer, make_prompt, make_request, random_prompts, run


@dataclass(frozen=True)
class Subject:
    engine: RolloutEngine
    folder: Path
    """HF folder of the model that it runs, in float32."""
    max_concurrent_rollouts: int
    max_sequence_tokens: int


class EngineConformance:
    def test_greedy_ids_equal_those_of_hf_for_prompts_of_any_length(self, subject: Subject) -> None:
        prompts = random_prompts((1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 65))
        rollouts = by_answer(
            run(subject.engine, [make_request(p, max_new_tokens=20, temperature=0.0) for p in prompts])
        )
        for prompt in prompts:
            assert list(rollouts[prompt.id, 0].token_ids) == greedy_ids(subject.folder, prompt, 20), prompt.id

    @pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
    def test_logprobs_are_those_of_hf_at_the_sampling_temperature(self, subject: Subject, temperature: float) -> None:
        prompts = random_prompts((1, 9, 32, 40), seed=3)
        requests = [make_request(p, 4, max_new_tokens=24, temperature=temperature) for p in prompts]
        rollouts = run(subject.engine, requests)
        assert sum(rollout.num_tokens for rollout in rollouts) == 4 * 4 * 24
        assert largest_difference(subject.folder, {p.id: p for p in prompts}, rollouts, temperature) < 1e-4

    @pytest.mark.parametrize("temperature", [0.7, 1.3])
    def test_first_tokens_have_the_distribution_of_the_model(self, subject: Subject, temperature: float) -> None:
        """Pearson's chi-square over all tokens that are expected five times; beyond 5 sigma is a wrong sampler."""
        prompt, num_draws = make_prompt("chi-square", (7, 70, 100)), 4000
        request = make_request(prompt, num_draws, max_new_tokens=1, temperature=temperature)
        rollouts = run(subject.engine, [request])
        drawn = np.bincount([rollout.token_ids[0] for rollout in rollouts], minlength=151)
        expected = distributions(subject.folder, prompt, (0,), temperature)[0].exp().numpy() * num_draws
        often = expected >= 5
        statistic = ((drawn - expected)[often] ** 2 / expected[often]).sum()
        freedom = often.sum() - 1
        assert freedom > 20, "the model is too sharp for this test"
        assert statistic < freedom + 5 * np.sqrt(2 * freedom)

    @pytest.mark.parametrize("temperature", [0.7, 1.3])
    def test_later_tokens_have_the_distribution_of_the_model(self, subject: Subject, temperature: float) -> None:
        """Probability integral transform: the cumulative probability at the drawn tokens is uniform, 20 bins."""
        prompts = random_prompts((5, 12, 33, 40), seed=11)
        rollouts = run(
            subject.engine, [make_request(p, 16, max_new_tokens=32, temperature=temperature) for p in prompts]
        )
        places, numbers = [], np.random.default_rng(0)
        for rollout in rollouts:
            prompt = next(p for p in prompts if p.id == rollout.prompt_id)
            cumulative = distributions(subject.folder, prompt, rollout.token_ids, temperature).exp().cumsum(-1)
            drawn = torch.tensor(rollout.token_ids)[:, None]
            upper = cumulative.gather(1, drawn)[:, 0].numpy()
            lower = np.where(drawn[:, 0] > 0, cumulative.gather(1, (drawn - 1).clamp(min=0))[:, 0].numpy(), 0.0)
            places.append(lower + numbers.random(len(upper)) * (upper - lower))
        counts, _ = np.histogram(np.concatenate(places), bins=20, range=(0, 1))
        expected = counts.sum() / 20
        assert counts.sum() == 4 * 16 * 32
        assert ((counts - expected) ** 2 / expected).sum() < 19 + 5 * np.sqrt(2 * 19)

    def test_members_of_a_group_differ_and_so_do_equal_prompts_with_other_ids(self, subject: Subject) -> None:
        tokens = (9, 50, 51)
        prompts = [make_prompt("one", tokens), make_prompt("two", tokens)]
        rollouts = run(subject.engine, [make_request(p, 8, seed=5, max_new_tokens=12) for p in prompts])
        assert len({rollout.token_ids for rollout in rollouts}) == 16

    def test_an_answer_does_not_depend_on_what_runs_beside_it(self, subject: Subject) -> None:
        prompt = make_prompt("steady", (20, 21, 22, 23))
        alone = by_answer(run(subject.engine, [make_request(prompt, 3, seed=7, max_new_tokens=16)]))
        others = [make_request(p, 2, seed=7, max_new_tokens=10) for p in random_prompts((3, 30, 60), seed=2)]
        requests = [*others[:2], make_request(prompt, 3, seed=7, max_new_tokens=16), others[2]]
        beside = by_answer(run(subject.engine, requests))
        longer = by_answer(run(subject.engine, [make_request(prompt, 4, seed=7, max_new_tokens=18)]))
        other_seed = by_answer(run(subject.engine, [make_request(prompt, 3, seed=8, max_new_tokens=16)]))
        for index in range(3):
            ids = alone["steady", index].token_ids
            assert beside["steady", index].token_ids == ids
            assert longer["steady", index].token_ids[:16] == ids
            assert other_seed["steady", index].token_ids != ids

    def test_an_answer_ends_with_the_first_of_several_stop_tokens(self, subject: Subject) -> None:
        prompt = make_prompt("stop", (30, 31))
        free = greedy_ids(subject.folder, prompt, 12)
        stops = (free[7], free[4])
        expected = free[: min(free.index(stop) for stop in stops) + 1]
        request = make_request(prompt, max_new_tokens=12, temperature=0.0, stop_token_ids=stops)
        (rollout,) = run(subject.engine, [request])
        assert list(rollout.token_ids) == expected
        assert rollout.finish_reason == "stop"
        assert len(rollout.logprobs) == len(expected)

    def test_a_truncated_answer_gets_no_invented_end(self, subject: Subject) -> None:
        prompt = make_prompt("long", (30, 31))
        free = greedy_ids(subject.folder, prompt, 6)
        unseen = next(token for token in range(3, 151) if token not in free)
        request = make_request(prompt, max_new_tokens=6, temperature=0.0, stop_token_ids=(unseen,))
        (rollout,) = run(subject.engine, [request])
        assert list(rollout.token_ids) == free
        assert rollout.finish_reason == "length"

    def test_a_stop_token_in_the_last_place_counts_as_stop(self, subject: Subject) -> None:
        prompt = make_prompt("just", (30, 31))
        free = greedy_ids(subject.folder, prompt, 6)
        last = next(place for place in range(6) if free[place] not in free[:place] and place > 0)
        request = make_request(prompt, max_new_tokens=last + 1, temperature=0.0, stop_token_ids=(free[last],))
        (rollout,) = run(subject.engine, [request])
        assert (rollout.finish_reason, list(rollout.token_ids)) == ("stop", free[: last + 1])

    def test_answers_of_one_token_work(self, subject: Subject) -> None:
        prompts = random_prompts((1, 4, 32), seed=5)
        rollouts = run(subject.engine, [make_request(p, 2, max_new_tokens=1) for p in prompts])
        assert sorted(rollout.num_tokens for rollout in rollouts) == [1] * 6
        assert largest_difference(subject.folder, {p.id: p for p in prompts}, rollouts, 1.0) < 1e-4

    def test_more_answers_than_run_at_a_time_all_come_once(self, subject: Subject) -> None:
        group = subject.max_concurrent_rollouts + 3
        prompts = random_prompts((6, 33, 3), seed=8)
        rollouts = by_answer(run(subject.engine, [make_request(p, group, max_new_tokens=8) for p in prompts]))
        assert set(rollouts) == {(prompt.id, index) for prompt in prompts for index in range(group)}
        assert largest_difference(subject.folder, {p.id: p for p in prompts}, list(rollouts.values()), 1.0) < 1e-4

    def test_a_source_may_have_nothing_for_a_while(self, subject: Subject) -> None:
        source = ListSource([make_request(p, max_new_tokens=3) for p in random_prompts((4, 5))], empty_answers=3)
        assert len(run(subject.engine, [], source=source)) == 2

    def test_top_k_and_top_p_take_tokens_away_but_leave_logprobs_as_they_are(self, subject: Subject) -> None:
        prompt = make_prompt("truncated", (7, 70, 100))
        rows = distributions(subject.folder, prompt, (0,), 1.0)[0]
        ranked = rows.argsort(descending=True).tolist()
        top_p = float(rows.exp()[ranked[:4]].sum()) - 1e-3  # the fourth token crosses it, so four stay
        for limits in ({"top_k": 4}, {"top_p": top_p}):
            rollouts = run(subject.engine, [make_request(prompt, 200, max_new_tokens=1, **limits)])
            assert {rollout.token_ids[0] for rollout in rollouts} == set(ranked[:4])
            assert largest_difference(subject.folder, {prompt.id: prompt}, rollouts, 1.0) < 1e-4

    def test_an_aborted_request_hands_over_what_it_has_and_the_others_go_on(self, subject: Subject) -> None:
        short, long = make_prompt("short", (40, 41)), make_prompt("long", (42, 43))
        undisturbed = by_answer(run(subject.engine, [make_request(long, 2, seed=3, max_new_tokens=40)]))
        requests = [make_request(short, max_new_tokens=4), make_request(long, 2, seed=3, max_new_tokens=40)]

        def abort_long(rollout):  # noqa: ANN001, ANN202
            return subject.engine.abort([requests[1].id]) if rollout.prompt_id == "short" else None

        rollouts = by_answer(run(subject.engine, requests, on_rollout=abort_long))
        assert rollouts["short", 0].finish_reason == "length"
        for index in range(2):
            stopped = rollouts["long", index]
            assert stopped.finish_reason == "abort"
            assert 0 < stopped.num_tokens < 40
            assert stopped.token_ids == undisturbed["long", index].token_ids[: stopped.num_tokens]
        assert len(run(subject.engine, [make_request(short, max_new_tokens=2)])) == 1  # the engine is fit for more

    def test_every_token_carries_the_version_that_sampled_it(self, subject: Subject) -> None:
        first, second = make_prompt("first", (40, 41)), make_prompt("second", (42, 43))
        subject.engine.set_version(4)
        requests = [make_request(first, max_new_tokens=4), make_request(second, max_new_tokens=12)]

        def publish(rollout):  # noqa: ANN001, ANN202
            if rollout.prompt_id == "first":
                subject.engine.set_version(5)

        rollouts = by_answer(run(subject.engine, requests, on_rollout=publish))
        assert [(span.start, span.version) for span in rollouts["first", 0].versions] == [(0, 4)]
        spans = rollouts["second", 0].versions
        assert [span.version for span in spans] == [4, 5]
        assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, 12)
        subject.engine.set_version(0)

    def test_sleeping_and_waking_changes_no_answer(self, subject: Subject) -> None:
        requests = [make_request(p, 2, seed=9, max_new_tokens=10) for p in random_prompts((5, 33), seed=4)]
        before = by_answer(run(subject.engine, requests))
        subject.engine.sleep(["kv_cache", "weights"])
        subject.engine.wake(["weights", "kv_cache"])
        after = by_answer(run(subject.engine, requests))
        assert {key: one.token_ids for key, one in before.items()} == {key: one.token_ids for key, one in after.items()}
        assert subject.engine.health().ok

    def test_a_request_that_can_never_fit_is_refused_with_prompt_and_setting(self, subject: Subject) -> None:
        prompt = make_prompt("too-long", [5] * 10)
        request = make_request(prompt, max_new_tokens=subject.max_sequence_tokens)
        with pytest.raises(ValueError, match="too-long.*modules.rollout.max_new_tokens"):
            run(subject.engine, [request])
        assert len(run(subject.engine, [make_request(prompt, max_new_tokens=2)])) == 1

    def test_stats_count_since_the_last_call(self, subject: Subject) -> None:
        subject.engine.stats()
        run(subject.engine, [make_request(p, 2, max_new_tokens=5) for p in random_prompts((4, 6))])
        counted = subject.engine.stats()
        assert counted.num_new_tokens == 2 * 2 * 5
        assert counted.num_steps > 0 and counted.busy_seconds > 0
        assert subject.engine.stats().num_new_tokens == 0


class ProcessEngineConformance(EngineConformance):
    """Of engines in a process of their own, which can be lost."""

    def kill(self, subject: Subject) -> None:
        """End the engine's process the hard way."""
        raise AssertionError("the test module of the engine says how")

    def test_what_a_killed_engine_left_open_is_finished_after_a_publish_and_counted_once(
        self, subject: Subject
    ) -> None:
        prompts = random_prompts((4, 12, 33), seed=21)
        requests = [make_request(p, 4, seed=3, max_new_tokens=40, temperature=0.7) for p in prompts]
        asked = {(prompt.id, index) for prompt in prompts for index in range(4)}
        quick = make_request(make_prompt("quick", (40, 41)), max_new_tokens=2)
        undisturbed = by_answer(run(subject.engine, requests))
        tickets = StaticTickets([quick, *requests], engine=0, num_engines=1)
        rollouts: list[Rollout] = []

        def killing(prompt: Prompt, rollout: Rollout) -> None:
            if rollout.prompt_id == "quick":
                self.kill(subject)

        arguments = {
            "prompts": {request.prompt.id: request.prompt for request in [quick, *requests]},
            "deadline_seconds": 240.0,
            "what": "test",
            "rollouts": rollouts,
        }
        with pytest.raises(EngineRestarted) as lost:
            collect(subject.engine, tickets, on_rollout=killing, **arguments)
        left = {(request.prompt.id, index) for request in lost.value.unfinished for index in request.members}
        assert left and subject.engine.needs_weights
        assert left.isdisjoint(by_answer(rollouts))
        subject.engine.set_version(0)  # here the engine's folder has the right weights
        collect(
            subject.engine,
            ResumedTickets(lost.value.unfinished, tickets),
            on_rollout=lambda prompt, rollout: None,
            **arguments,
        )
        found = by_answer(rollouts)
        assert set(found) == asked | {("quick", 0)}
        assert {key: one.token_ids for key, one in found.items() if key in asked} == {
            key: one.token_ids for key, one in undisturbed.items()
        }
