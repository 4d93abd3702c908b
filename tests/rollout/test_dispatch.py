"""Tickets and the driver that collects rollouts: dealt once, streamed, complete, in time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest

from grpo_megatron.batch import Rollout, VersionSpan
from grpo_megatron.rollout import dispatch
from grpo_megatron.rollout.base import RequestSource, RolloutRequest, SamplingSettings
from grpo_megatron.rollout.dispatch import SharedTickets, StaticTickets, collect, make_requests, missing_rollouts
from tests.rollout.requests import make_prompt

pytestmark = pytest.mark.unit
SAMPLING = SamplingSettings(max_new_tokens=4)


def _requests(count: int, num_rollouts: int = 2) -> tuple[RolloutRequest, ...]:
    prompts = [make_prompt(f"p{place}", (5,)) for place in range(count)]
    return make_requests(prompts, num_rollouts=num_rollouts, sampling=SAMPLING, seed=0, name="step-7")


def _ids(requests: Sequence[RolloutRequest] | None) -> list[str] | None:
    return None if requests is None else [request.prompt.id for request in requests]


class _Counter:
    def __init__(self) -> None:
        self._values: Counter[str] = Counter()

    def add(self, key: str, amount: int) -> int:
        self._values[key] += amount
        return self._values[key]


def test_request_ids_name_step_and_prompt() -> None:
    assert [request.id for request in _requests(2)] == ["step-7/p0", "step-7/p1"]


def test_a_prompt_id_that_comes_twice_is_refused() -> None:
    prompts = [make_prompt("same", (5,)), make_prompt("same", (6,))]
    with pytest.raises(ValueError, match="data.prompts: step-7 .*same"):
        make_requests(prompts, num_rollouts=2, sampling=SAMPLING, seed=0, name="step-7")


def test_static_tickets_go_round_in_turn_whoever_asks_first() -> None:
    requests = _requests(5)
    second = StaticTickets(requests, engine=1, num_engines=2)
    first = StaticTickets(requests, engine=0, num_engines=2)
    assert _ids(second.take(100)) == ["p1", "p3"]
    assert _ids(first.take(4)) == ["p0", "p2"]
    assert _ids(first.take(4)) == ["p4"]
    assert first.take(4) is None and second.take(4) is None


def test_a_request_larger_than_the_room_comes_alone() -> None:
    tickets = StaticTickets(_requests(3, num_rollouts=8), engine=0, num_engines=1)
    assert _ids(tickets.take(3)) == ["p0"]
    assert _ids(tickets.take(17)) == ["p1", "p2"]


def test_shared_tickets_are_each_given_once_and_nobody_takes_more_than_a_fair_share_of_what_is_left() -> None:
    counter, requests = _Counter(), _requests(16)
    fast, slow = (SharedTickets(requests, counter=counter, key="step-7", num_engines=2) for _ in range(2))
    sizes = []
    while (taken := fast.take(1000)) is not None:
        sizes.append(len(taken))
        if len(sizes) == 1:
            assert len(slow.take(1000)) == 4
    assert sizes == [8, 2, 1, 1]
    assert slow.take(1000) is None
    assert Counter(r.id for r in [*fast.taken, *slow.taken]) == Counter(r.id for r in requests)


def test_shared_tickets_respect_the_room() -> None:
    tickets = SharedTickets(_requests(16), counter=_Counter(), key="step-7", num_engines=1)
    assert len(tickets.take(5)) == 2
    assert len(tickets.take(1)) == 1


def test_a_claim_beyond_the_last_ticket_takes_only_what_is_there() -> None:
    """Two replicas read the counter before either adds: the later one's claim reaches behind the end."""
    counter, requests = _Counter(), _requests(4)
    tickets = SharedTickets(requests, counter=counter, key="k", num_engines=1)
    add, calls = counter.add, []

    def raced(key: str, amount: int) -> int:
        if amount == 0 and not calls:
            calls.append(1)
            add(key, 3)  # the other replica, just after our look at the counter
            return 0
        return add(key, amount)

    counter.add = raced  # type: ignore[method-assign]
    assert _ids(tickets.take(100)) == ["p3"]
    assert tickets.take(100) is None


class _Engine:
    """Answers as it is told; one rollout every turn of the event loop."""

    def __init__(self, *, drops: int = 0, repeats: int = 0, hangs_after: int | None = None, deaf: bool = False) -> None:
        self._drops, self._repeats, self._hangs_after, self._deaf = drops, repeats, hangs_after, deaf
        self._aborted: set[str] = set()
        self.closed = False

    async def generate(self, requests: RequestSource) -> AsyncIterator[Rollout]:
        done = 0
        try:
            while (taken := requests.take(4)) is not None:
                for request in taken:
                    for index in range(request.num_rollouts):
                        while self._hangs_after == done and request.id not in self._aborted:
                            await asyncio.sleep(0.01)
                        reason = "abort" if request.id in self._aborted else "stop"
                        if done >= self._drops or reason == "abort":
                            yield _rollout(request.prompt.id, index, reason)
                        if done < self._repeats:
                            yield _rollout(request.prompt.id, index, reason)
                        done += reason == "stop"
                        await asyncio.sleep(0)
        finally:
            self.closed = True

    async def abort(self, request_ids: Sequence[str]) -> None:
        if not self._deaf:
            self._aborted.update(request_ids)


def _rollout(prompt_id: str, index: int, reason: str) -> Rollout:
    return Rollout(prompt_id, index, (5, 2), (-0.5, -0.1), reason, (VersionSpan(0, 2, 0),))


def _collect(engine: _Engine, requests: Sequence[RolloutRequest], *, deadline: float = 5.0, seen=None):  # noqa: ANN001, ANN202
    streamed = [] if seen is None else seen
    rollouts = collect(
        engine,  # type: ignore[arg-type]
        StaticTickets(requests, engine=0, num_engines=1),
        on_rollout=lambda prompt, rollout: streamed.append((prompt.id, rollout.index)),
        prompts={request.prompt.id: request.prompt for request in requests},
        deadline_seconds=deadline,
        what="rollout of step 7",
    )
    return rollouts, streamed


def test_every_rollout_is_handed_on_as_it_ends() -> None:
    rollouts, streamed = _collect(_Engine(), _requests(3))
    assert streamed == [(rollout.prompt_id, rollout.index) for rollout in rollouts]
    assert streamed == [(f"p{prompt}", index) for prompt in range(3) for index in range(2)]


def test_a_dropped_rollout_is_an_error_that_names_its_prompt() -> None:
    """Case E1: an engine that says it is done although an answer is missing."""
    with pytest.raises(RuntimeError, match="rollout of step 7: the engine dropped 1 of 6 rollouts: prompt ids p0"):
        _collect(_Engine(drops=1), _requests(3))


def test_a_rollout_that_comes_twice_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="gave 7 rollouts where 6"):
        _collect(_Engine(repeats=1), _requests(3))


def test_the_deadline_stops_the_engine_and_names_what_is_missing() -> None:
    engine, seen = _Engine(hangs_after=3), []
    with pytest.raises(
        TimeoutError, match="rollout of step 7: 1 of 4 rollouts missing after 0 s: prompt ids p1; raise"
    ):
        _collect(engine, _requests(3), deadline=0.1, seen=seen)
    assert seen[:3] == [("p0", 0), ("p0", 1), ("p1", 0)]
    assert engine.closed


def test_an_engine_that_does_not_listen_to_abort_is_left_after_a_grace_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ABORT_SECONDS", 0.1)
    engine = _Engine(hangs_after=0, deaf=True)
    with pytest.raises(TimeoutError, match="4 of 4 rollouts missing"):
        _collect(engine, _requests(2), deadline=0.1)
    assert engine.closed


def test_an_error_while_handing_on_ends_the_stream_and_is_raised() -> None:
    engine = _Engine()

    def fail(prompt, rollout) -> None:  # noqa: ANN001
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        collect(
            engine,  # type: ignore[arg-type]
            StaticTickets(_requests(2), engine=0, num_engines=1),
            on_rollout=fail,
            prompts={request.prompt.id: request.prompt for request in _requests(2)},
            deadline_seconds=5,
            what="rollout of step 7",
        )
    assert engine.closed


def test_missing_rollouts_are_those_asked_for_and_not_there() -> None:
    requests = _requests(2)
    there = [_rollout("p0", 1, "stop"), _rollout("p1", 0, "abort")]
    assert missing_rollouts(requests, there) == [("p0", 0), ("p1", 1)]
