"""Faults of a server that the real one has seldom: spoiled, forgotten and cut-off answers, silence, lies."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from grpo_megatron.rollout.base import EnginePlace, EngineRestarted
from grpo_megatron.rollout.client import answer_seed
from grpo_megatron.rollout.dispatch import ResumedTickets, StaticTickets, collect
from grpo_megatron.rollout.sglang.engine import EngineLimits, EngineMemory, SglangEngine
from tests.rollout.fake_server import Behaviour, FakeServer, answer_pieces
from tests.rollout.requests import by_answer, make_prompt, make_request, random_prompts, run

pytestmark = pytest.mark.unit


@dataclass
class FakeProcess:
    address: str
    token: str = "secret"
    is_running: bool = True


class FakeLife:
    """A life whose restart makes the server well again."""

    def __init__(self, server: FakeServer) -> None:
        self.process = FakeProcess(server.address)
        self.asleep: frozenset[str] = frozenset()
        self.version = 0
        self.is_paused = False
        self.reasons: list[str] = []
        self.on_restart: Callable[[], None] = lambda: None

    def restart(self, reason: str) -> None:
        self.reasons.append(reason)
        self.version = -1
        self.process.is_running = True
        self.on_restart()


@dataclass
class Subject:
    engine: SglangEngine
    life: FakeLife
    behaviour: Behaviour


@pytest.fixture
def subject() -> Iterator[Subject]:
    behaviour = Behaviour(pieces=answer_pieces)
    server = FakeServer(behaviour)
    life = FakeLife(server)
    limits = EngineLimits(
        max_concurrent_rollouts=4, max_sequence_tokens=64, vocab_size=151, share_prompts=True, stall_seconds=0.4
    )
    engine = SglangEngine(
        life,  # type: ignore[arg-type]
        EnginePlace(0, 1, True),
        limits,
        EngineMemory(0, 0, frees_memory=False),
        decode=lambda ids: "",
    )
    yield Subject(engine, life, behaviour)
    server.close()


def first_sending(behaviour: Behaviour, prompt: str, index: int) -> Callable[[dict[str, Any]], bool]:
    """True for the first request for this answer only."""
    seen: list[str] = []

    def is_it(request: dict[str, Any]) -> bool:
        if request["rid"].startswith(f"test/{prompt}/{index}/") and request["rid"] not in seen:
            seen.append(request["rid"])
        return seen[:1] == [request["rid"]]

    return is_it


def test_requests_carry_the_token_ids_limits_and_a_seed_of_their_own(subject: Subject) -> None:
    prompt = make_prompt("p", (5, 6, 7))
    rollouts = by_answer(run(subject.engine, [make_request(prompt, 2, seed=3, max_new_tokens=5, temperature=0.7)]))
    assert {key: len(rollout.token_ids) for key, rollout in rollouts.items()} == {("p", 0): 5, ("p", 1): 5}
    assert rollouts["p", 0].token_ids != rollouts["p", 1].token_ids  # the seeds differ, and the fake draws from them
    first = next(request for request in subject.behaviour.requests if request["rid"].startswith("test/p/0/"))
    assert first["input_ids"] == [5, 6, 7]
    assert first["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 5,
        "stop_token_ids": [],
        "ignore_eos": True,
        "sampling_seed": answer_seed(3, "p", 0),
    }
    assert subject.behaviour.authorizations == {"Bearer secret"}


def test_seeds_differ_by_seed_prompt_and_index() -> None:
    seeds = {answer_seed(seed, prompt, index) for seed in (0, 1) for prompt in ("a", "b") for index in range(16)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_no_more_requests_are_open_than_the_engine_works_on(subject: Subject) -> None:
    open_now, most = 0, 0
    original = subject.behaviour.pieces

    def counting(request: dict[str, Any]) -> list[dict[str, Any]]:
        nonlocal most
        most = max(most, len(subject.engine._running))
        return original(request)

    subject.behaviour.pieces = counting
    assert len(run(subject.engine, [make_request(p, 5, max_new_tokens=2) for p in random_prompts((3, 4, 5))])) == 15
    assert 1 < most <= 4
    assert open_now == 0


def test_a_cut_off_answer_is_asked_again_and_counted_once(subject: Subject) -> None:
    subject.behaviour.cut = first_sending(subject.behaviour, "p", 1)
    rollouts = by_answer(run(subject.engine, [make_request(make_prompt("p", (5, 6)), 3, max_new_tokens=6)]))
    assert set(rollouts) == {("p", 0), ("p", 1), ("p", 2)}
    assert all(rollout.num_tokens == 6 for rollout in rollouts.values())
    assert len(subject.behaviour.requests) == 4
    assert subject.engine.stats().num_new_tokens == 18


def test_a_forgotten_request_is_stopped_and_asked_again_while_the_server_answers_others(subject: Subject) -> None:
    subject.behaviour.silent = first_sending(subject.behaviour, "p", 0)
    rollouts = by_answer(run(subject.engine, [make_request(make_prompt("p", (5, 6)), 3, max_new_tokens=6)]))
    assert set(rollouts) == {("p", 0), ("p", 1), ("p", 2)}
    forgotten = [request["rid"] for request in subject.behaviour.requests if request["rid"].startswith("test/p/0/")]
    assert len(forgotten) == 2
    assert forgotten[0] in subject.behaviour.aborted
    assert subject.life.reasons == []


def test_an_aborted_group_ends_at_once_also_where_it_waits_for_its_prompt(subject: Subject) -> None:
    """The first of four computes the prompt and gets nowhere; the others have not been sent; another prompt goes on."""
    subject.behaviour.silent = lambda request: request["rid"].startswith("test/long/")
    requests = [make_request(make_prompt("long", range(5, 25)), 3, max_new_tokens=9)]
    requests.append(make_request(make_prompt("short", (5, 6)), max_new_tokens=4))

    def abort_long(rollout: Any) -> Any:
        return subject.engine.abort([requests[0].id]) if rollout.prompt_id == "short" else None

    rollouts = by_answer(run(subject.engine, requests, on_rollout=abort_long))
    assert {key: one.finish_reason for key, one in rollouts.items()} == {
        ("short", 0): "length",
        **{("long", index): "abort" for index in range(3)},
    }
    assert sum(request["rid"].startswith("test/long/") for request in subject.behaviour.requests) == 1


def nonsense(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    def pieces(request: dict[str, Any]) -> list[dict[str, Any]]:
        made = answer_pieces(request)
        change(made[-1])
        return made

    return pieces


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda piece: piece["output_ids"].append(4), "7 tokens with 6 log-probs"),
        (lambda piece: piece["output_ids"].__setitem__(0, 151), "outside the vocabulary"),
        (lambda piece: piece["meta_info"]["output_token_logprobs"].__setitem__(0, [float("nan"), 3, None]), "log-prob"),
        (lambda piece: piece["meta_info"]["output_token_logprobs"].__setitem__(0, [0.5, 3, None]), "log-prob"),
        (lambda piece: piece["meta_info"].__setitem__("finish_reason", None), "without a reason"),
        (lambda piece: piece["meta_info"].__setitem__("finish_reason", {"type": "stop"}), "does not name"),
        (lambda piece: piece["meta_info"].__setitem__("weight_version", "default"), "versions"),
        (lambda piece: piece["meta_info"].__setitem__("weight_version", "7"), "version 7, and 0 was published"),
        (lambda piece: piece.pop("output_ids"), "lacks tokens"),
    ],
)
def test_an_engine_that_talks_nonsense_is_restarted(subject: Subject, change: Any, told: str) -> None:
    subject.behaviour.pieces = nonsense(change)
    with pytest.raises(EngineRestarted) as restarted:
        run(subject.engine, [make_request(make_prompt("p", (5, 6)), 2, max_new_tokens=6)])
    assert told in subject.life.reasons[0]
    assert [request.indices for request in restarted.value.unfinished] == [(0, 1)]
    assert subject.engine.needs_weights


def test_a_server_that_hangs_is_found_and_what_it_had_is_finished_after_the_restart(subject: Subject) -> None:
    """Two of four answers come, then silence: the rest is asked of the restarted server, nothing is counted twice."""
    subject.behaviour.silent = lambda request: request["rid"].split("/")[2] in ("2", "3")
    subject.behaviour.is_healthy = False

    def heal() -> None:
        subject.behaviour.silent = lambda request: False

    subject.life.on_restart = heal
    prompt = make_prompt("p", (5, 6))
    tickets = StaticTickets([make_request(prompt, 4, max_new_tokens=6)], engine=0, num_engines=1)
    rollouts: list[Any] = []
    handed_out: list[int] = []
    arguments: dict[str, Any] = {
        "on_rollout": lambda prompt, rollout: handed_out.append(rollout.index),
        "prompts": {"p": prompt},
        "deadline_seconds": 30,
        "what": "test",
        "rollouts": rollouts,
    }
    with pytest.raises(EngineRestarted, match="no token for") as restarted:
        collect(subject.engine, tickets, **arguments)
    assert sorted(handed_out) == [0, 1]
    with pytest.raises(EngineRestarted, match="no version"):  # not before the weights are there
        collect(subject.engine, ResumedTickets(restarted.value.unfinished, tickets), **arguments)
    subject.life.version = 0
    collect(subject.engine, ResumedTickets(restarted.value.unfinished, tickets), **arguments)
    assert sorted(handed_out) == [0, 1, 2, 3]
    assert len(by_answer(rollouts)) == 4


def test_a_process_that_ended_is_restarted_at_the_first_broken_connection(subject: Subject) -> None:
    def die(request: dict[str, Any]) -> bool:
        subject.life.process.is_running = False
        return True

    subject.behaviour.cut = die
    with pytest.raises(EngineRestarted):
        run(subject.engine, [make_request(make_prompt("p", (5, 6)), 2, max_new_tokens=6)])
    assert "its process ended" in subject.life.reasons[0]


def test_a_stream_that_is_closed_early_leaves_nothing_running_on_the_server(subject: Subject) -> None:
    subject.behaviour.silent = lambda request: request["rid"].startswith("test/long/")

    async def take_one() -> None:
        requests = [make_request(make_prompt(name, (5, 6)), max_new_tokens=4) for name in ("short", "long")]
        stream = subject.engine.generate(StaticTickets(requests, engine=0, num_engines=1))
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(take_one())
    assert [name.split("/")[1] for name in subject.behaviour.aborted] == ["long"]


def test_no_proxy_stands_between_rank_and_server(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert len(run(subject.engine, [make_request(make_prompt("p", (5, 6)), 2, max_new_tokens=3)])) == 2
