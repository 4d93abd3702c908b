"""The embedded engine on several ranks: every layout gives HF's greedy ids and log-probs, on every rank the same."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import torch
from megatron.core import parallel_state

from grpo_megatron.batch import Rollout
from grpo_megatron.config.schema import RolloutSection
from grpo_megatron.families.describe import describe
from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.platform.device import current_platform
from grpo_megatron.rollout.base import RolloutRequest
from grpo_megatron.rollout.dispatch import SharedTickets, StaticTickets, collect
from grpo_megatron.rollout.megatron.build import build_megatron_engine
from grpo_megatron.rollout.megatron.engine import MegatronEngine
from tests.building import build_tiny_policy
from tests.distributed.harness import CaseContext, case
from tests.rollout.oracle import greedy_ids, largest_difference
from tests.rollout.requests import ListSource, by_answer, make_prompt, make_request, random_prompts, run
from tests.tiny import make_tiny_llama


def _folder(context: CaseContext) -> Path:
    folder = context.shared_folder / "llama-for-rollout"
    if context.rank == 0 and not folder.exists():
        make_tiny_llama(folder, tie_embeddings=True)
    torch.distributed.barrier()
    return folder


def _engine(context: CaseContext, groups: Groups, *, sequence_parallel: bool = False) -> tuple[MegatronEngine, list]:
    folder = _folder(context)
    chunks = build_tiny_policy(folder, groups, sequence_parallel=sequence_parallel)
    section = RolloutSection(engine="megatron", max_concurrent_rollouts=7)
    return (
        build_megatron_engine(chunks, describe(folder), section, groups, current_platform(), lambda ids: "", 128),
        chunks,
    )


class _LeaderOnly(ListSource):
    """Fails where it must not be asked."""

    def __init__(self, groups: Groups, requests: Sequence[RolloutRequest]) -> None:
        super().__init__(requests)
        self._is_leader = groups.is_model_leader

    def take(self, max_rollouts: int) -> Sequence[RolloutRequest] | None:
        assert self._is_leader, "only the leader of a model-parallel group takes requests"
        return super().take(max_rollouts)


def _run(engine: MegatronEngine, groups: Groups, requests: Sequence[RolloutRequest]) -> list[Rollout]:
    """Rollouts that are the same, bit for bit and in the same order, on every rank of the model-parallel group."""
    rollouts = run(engine, [], source=_LeaderOnly(groups, requests))
    assert all(other == rollouts for other in gather_objects(rollouts, groups.model)), "ranks disagree"
    return rollouts


def _check_layout(context: CaseContext, groups: Groups, *, sequence_parallel: bool = False) -> None:
    engine, chunks = _engine(context, groups, sequence_parallel=sequence_parallel)
    folder, prompts = _folder(context), random_prompts((1, 5, 32, 33, 40))
    greedy = by_answer(_run(engine, groups, [make_request(p, 2, max_new_tokens=10, temperature=0.0) for p in prompts]))
    for (prompt_id, _), rollout in greedy.items():
        prompt = next(prompt for prompt in prompts if prompt.id == prompt_id)
        assert list(rollout.token_ids) == greedy_ids(folder, prompt, 10), (prompt_id, rollout.token_ids)
    for temperature in (0.7, 1.3):
        requests = [make_request(p, 9, max_new_tokens=8, temperature=temperature) for p in prompts[1:4]]
        sampled = _run(engine, groups, requests)
        assert len(by_answer(sampled)) == 27
        assert largest_difference(folder, {p.id: p for p in prompts}, sampled, temperature) < 1e-4
    assert engine.health().ok
    assert chunks[0].training
    assert parallel_state.get_global_memory_buffer().buffer == {}


@case(world_size=2)
def tensor_2_generates_what_hf_does(context: CaseContext) -> None:
    _check_layout(context, context.groups(tensor=2))


@case(world_size=2)
def tensor_2_with_sequence_parallelism_generates_what_hf_does(context: CaseContext) -> None:
    _check_layout(context, context.groups(tensor=2), sequence_parallel=True)


@case(world_size=2)
def pipeline_2_generates_what_hf_does(context: CaseContext) -> None:
    _check_layout(context, context.groups(pipeline=2))


@case(world_size=4)
def tensor_2_pipeline_2_generates_what_hf_does(context: CaseContext) -> None:
    _check_layout(context, context.groups(tensor=2, pipeline=2))


@case(world_size=4)
def tensor_2_pipeline_2_with_sequence_parallelism_generates_what_hf_does(context: CaseContext) -> None:
    _check_layout(context, context.groups(tensor=2, pipeline=2), sequence_parallel=True)


@case(world_size=4)
def a_padded_vocabulary_of_151_on_tensor_4_never_yields_a_padding_token(context: CaseContext) -> None:
    """Case W7: 152 rows, the last is nobody's. At a high temperature it would come up once in 152 draws."""
    groups = context.groups(tensor=4)
    engine, chunks = _engine(context, groups)
    weight = chunks[0].embedding.word_embeddings.weight
    if groups.tensor_rank == 3:
        with torch.no_grad():
            weight[-1] = weight[:-1].sum(dim=0) * 50  # garbage where nothing may look
    prompt = make_prompt("padding", (7, 70, 100))
    requests = [make_request(prompt, 300, max_new_tokens=4, temperature=50.0)]
    rollouts = _run(engine, groups, requests)
    tokens = {token for rollout in rollouts for token in rollout.token_ids}
    assert max(tokens) == 150 and len(tokens) > 140, (max(tokens), len(tokens))
    assert largest_difference(_folder(context), {prompt.id: prompt}, rollouts[:20], 50.0) < 1e-4


@case(world_size=2)
def a_refused_request_is_an_error_on_every_rank_and_the_next_rollout_works(context: CaseContext) -> None:
    groups = context.groups(tensor=2)
    engine, _ = _engine(context, groups)
    message = ""
    try:
        _run(engine, groups, [make_request(make_prompt("endless", (5, 6)), max_new_tokens=1000)])
    except ValueError as error:
        message = str(error)
    assert "endless" in message and "modules.rollout.max_new_tokens" in message, message
    assert len(_run(engine, groups, [make_request(make_prompt("fine", (5, 6)), 3, max_new_tokens=4)])) == 3


@case(world_size=2)
def a_source_that_breaks_on_the_leader_is_an_error_on_every_rank(context: CaseContext) -> None:
    groups = context.groups(pipeline=2)
    engine, _ = _engine(context, groups)

    class Broken:
        def take(self, max_rollouts: int) -> None:
            raise ConnectionError("store is gone")

    try:
        run(engine, [], source=Broken())  # type: ignore[arg-type]
    except RuntimeError as error:
        assert "ConnectionError: store is gone" in str(error)
    else:
        raise AssertionError("no error")


@case(world_size=2)
def what_the_leader_aborts_ends_on_every_rank(context: CaseContext) -> None:
    groups = context.groups(pipeline=2)
    engine, _ = _engine(context, groups)
    requests = [
        make_request(make_prompt("short", (5,)), max_new_tokens=3),
        make_request(make_prompt("long", (6,)), 8, max_new_tokens=100),
    ]

    def abort(rollout: Rollout):  # noqa: ANN202
        return engine.abort([requests[1].id]) if groups.is_model_leader and rollout.prompt_id == "short" else None

    rollouts = run(engine, [], source=_LeaderOnly(groups, requests), on_rollout=abort)
    assert all(other == rollouts for other in gather_objects(rollouts, groups.model))
    stopped = [rollout for rollout in rollouts if rollout.prompt_id == "long"]
    assert {rollout.finish_reason for rollout in stopped} == {"abort"}
    assert sorted(rollout.num_tokens > 0 for rollout in stopped) == [False] * 2 + [True] * 6  # 7 rows at a time


@case(world_size=2)
def a_leader_that_gives_up_ends_the_stream_of_the_others(context: CaseContext) -> None:
    groups = context.groups(tensor=2)
    engine, _ = _engine(context, groups)
    requests = [make_request(p, max_new_tokens=2 + 30 * place) for place, p in enumerate(random_prompts((4, 5)))]

    async def read() -> str:
        try:
            async with aclosing(engine.generate(_LeaderOnly(groups, requests))) as stream:
                async for _ in stream:
                    if groups.is_model_leader:
                        return "left"
        except RuntimeError as error:
            return str(error)
        return "read to the end"

    said = asyncio.run(read())
    assert said == ("left" if groups.is_model_leader else "rollout: the leader closed the stream"), said
    assert len(_run(engine, groups, [make_request(make_prompt("next", (5, 6)), 2, max_new_tokens=4)])) == 2


@case(world_size=2)
def two_replicas_answer_each_ticket_once_and_the_same_however_it_is_dealt(context: CaseContext) -> None:
    groups = context.groups()
    engine, _ = _engine(context, groups)
    prompts = {prompt.id: prompt for prompt in random_prompts((3, 9, 33, 4, 20, 6))}
    requests = [make_request(prompt, 4, max_new_tokens=6) for prompt in prompts.values()]

    class Counter:
        def add(self, key: str, amount: int) -> int:
            return torch.distributed.distributed_c10d._get_default_store().add(key, amount)

    counter_key = f"tickets-{context.folder.name}"
    found = []
    for tickets in (
        StaticTickets(requests, engine=groups.replica, num_engines=groups.num_replicas),
        SharedTickets(requests, counter=Counter(), key=counter_key, num_engines=groups.num_replicas),
    ):
        streamed: list[Rollout] = []
        rollouts = collect(
            engine,
            tickets,
            prompts=prompts,
            on_rollout=lambda prompt, rollout: streamed.append(rollout),  # noqa: B023
            deadline_seconds=60,
            what="rollout of step 1",
        )
        assert streamed == rollouts
        found.append(by_answer([one for part in gather_objects(rollouts, groups.world) for one in part]))
    static, shared = found
    assert set(static) == set(shared) == {(prompt_id, index) for prompt_id in prompts for index in range(4)}
    assert {key: one.token_ids for key, one in static.items()} == {key: one.token_ids for key, one in shared.items()}
    assert all(math.isfinite(logprob) for one in static.values() for logprob in one.logprobs)
