"""SGLang as a rollout engine: tickets in, rollouts out, through a server that may die at any moment."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from grpo_megatron.batch import Rollout
from grpo_megatron.rollout.base import (
    NO_VERSION,
    EngineCapabilities,
    EngineHealth,
    EnginePart,
    EnginePlace,
    EngineRestarted,
    EngineStats,
    RequestSource,
    RolloutRequest,
)
from grpo_megatron.rollout.client import Answer, GenerationClient, ServerFault, answer_seed
from grpo_megatron.rollout.sglang.control import EngineFailure
from grpo_megatron.rollout.sglang.life import EngineLife

SHARED_PROMPT_TOKENS = 8
"""From this length on a group waits for the first member, whose prompt then lies in the cache for all. SGLang computes
equal prompts that come together each for itself; the shortest are computed faster than waited for."""
MAX_ATTEMPTS = 3
"""How often a live server may spoil or forget one answer before it counts as lost."""
FIRST_TOKEN_FACTOR = 5
"""The first token of an answer may take so many times longer than a next one: prompts of others are computed before."""
_POLL_SECONDS = 0.05
_PROBE_SECONDS = 10.0


@dataclass(frozen=True)
class EngineLimits:
    max_concurrent_rollouts: int
    max_sequence_tokens: int
    """Longest prompt and answer together."""
    vocab_size: int
    share_prompts: bool
    """A group computes its prompt once."""
    stall_seconds: float
    """After this silence a server is probed, and an answer that is silent beside a server that talks is asked anew."""


@dataclass(frozen=True)
class EngineMemory:
    """What one device holds for the engine."""

    weight_bytes: int
    cache_bytes: int
    frees_memory: bool
    """Parts that sleep give it back; SGLang cannot do that on a CPU."""


@dataclass
class _Work:
    """One answer that is wanted."""

    request: RolloutRequest
    index: int
    attempt: int = 0
    name: str = ""
    heard_at: float = field(default_factory=time.monotonic)
    prompt_cached: asyncio.Event | None = None
    """Set by the first member of a group as soon as it samples; the others wait for it."""
    leads: bool = True
    has_begun: bool = False
    """A token of the running attempt has come."""

    @property
    def is_waiting(self) -> bool:
        return self.prompt_cached is not None and not self.leads and not self.prompt_cached.is_set()

    def heard(self) -> None:
        self.heard_at = time.monotonic()
        self.has_begun = True
        if self.leads:
            self.release()

    def release(self, *_: object) -> None:
        if self.prompt_cached is not None:
            self.prompt_cached.set()


class _Lost(Exception):  # noqa: N818 an event, not an error
    """The server cannot be used any more; the text says why."""


class SglangEngine:
    """A `RolloutEngine`; every rank of its group has one, and only the leader's talks to the server.

    Args:
        life: the server, on the leader; None elsewhere.
        decode: token ids to text without special tokens.
    """

    def __init__(
        self,
        life: EngineLife | None,
        place: EnginePlace,
        limits: EngineLimits,
        memory: EngineMemory,
        *,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        assert (life is not None) == place.is_leader
        self.capabilities = EngineCapabilities(shares_training_modules=False, frees_memory=memory.frees_memory)
        self.life = life
        self.place = place
        self.weight_bytes, self.cache_bytes = memory.weight_bytes, memory.cache_bytes
        self._limits = limits
        self._decode = decode
        self._stats = EngineStats(0, 0, 0.0, 0)
        self._client: GenerationClient | None = None
        self._running: dict[asyncio.Task[Answer], _Work] = {}
        self._aborted: set[str] = set()
        self._number = 0

    @property
    def needs_weights(self) -> bool:
        return self.life is not None and self.life.version == NO_VERSION

    async def generate(self, requests: RequestSource) -> AsyncIterator[Rollout]:
        """See `RolloutEngine.generate`."""
        life = self.life
        if life is None:
            return
        assert not life.asleep, f"generate while {', '.join(sorted(life.asleep))} of the engine sleep"
        if life.version == NO_VERSION:
            raise EngineRestarted("the engine has no version of the policy yet", ())
        self._aborted.clear()
        waiting: deque[_Work] = deque()
        begin = time.monotonic()
        reason = None
        limits, process = self._limits, life.process
        async with GenerationClient(
            process.address, process.token, max_open=limits.max_concurrent_rollouts, vocab_size=limits.vocab_size
        ) as client:
            self._client = client
            try:
                async for rollout in self._work_off(client, requests, waiting):
                    yield rollout
            except _Lost as lost:
                reason = str(lost)
            finally:
                unfinished = [*self._running.values(), *waiting]
                await self._drop_all(client, is_lost=reason is not None)
                self._count(num_steps=client.num_pieces, busy_seconds=time.monotonic() - begin)
                self._client = None
        if reason is not None:
            life.restart(reason)
            raise EngineRestarted(reason, _as_requests(unfinished))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Running answers of these requests end with what they have, and those that have not begun with nothing."""
        self._aborted.update(request_ids)
        works = [work for work in self._running.values() if work.request.id in self._aborted]
        if self._client is not None:
            await asyncio.gather(*(self._client.abort(work.name) for work in works if not work.is_waiting))
        for work in works:
            work.release()

    def pause(self) -> None:
        """Stop sampling until `resume`: a publish in the middle of answers, each token stamped with its version."""
        if self.life is not None:
            self.life.pause()

    def resume(self) -> None:
        if self.life is not None:
            self.life.resume()
            for work in self._running.values():
                work.heard_at = time.monotonic()

    def sleep(self, parts: Sequence[EnginePart]) -> None:
        if self.life is not None:
            self.life.sleep(parts)

    def wake(self, parts: Sequence[EnginePart]) -> None:
        if self.life is not None:
            self.life.wake(parts)

    def set_version(self, policy_version: int) -> None:
        """A server that is gone by now is found when it is asked to generate."""
        if self.life is not None:
            with contextlib.suppress(EngineFailure):
                self.life.set_version(policy_version)

    def health(self) -> EngineHealth:
        """Whether the server answers, and the version that it says it serves."""
        if self.life is None:
            return EngineHealth(True, NO_VERSION, "another rank leads this engine")
        try:
            return EngineHealth(True, self.life.read_version())
        except EngineFailure as failure:
            return EngineHealth(False, NO_VERSION, str(failure))

    def stats(self) -> EngineStats:
        counted, self._stats = self._stats, EngineStats(0, 0, 0.0, 0)
        return counted

    def close(self) -> None:
        if self.life is not None:
            self.life.close()

    async def _work_off(
        self, client: GenerationClient, requests: RequestSource, waiting: deque[_Work]
    ) -> AsyncIterator[Rollout]:
        """Take, send, yield, until there are no more tickets. Raises _Lost."""
        is_over = False
        while True:
            room = self._limits.max_concurrent_rollouts - len(self._running) - len(waiting)
            if not is_over and room > 0:  # once in a round: what one engine takes at once, the others do not get
                taken = requests.take(room)
                is_over = taken is None
                for request in taken or ():
                    self._refuse_too_long(request)
                    waiting.extend(self._group(request))
            while waiting and len(self._running) < self._limits.max_concurrent_rollouts:
                self._send(client, waiting.popleft())
            if not self._running:
                if is_over:
                    return
                await asyncio.sleep(_POLL_SECONDS)
                continue
            has_room = not is_over and len(self._running) < self._limits.max_concurrent_rollouts
            tick = _POLL_SECONDS if has_room else min(1.0, self._limits.stall_seconds / 4)
            done, _ = await asyncio.wait(self._running, timeout=tick, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                work = self._running.pop(task)
                try:
                    yield self._rollout(work, task.result())
                except ServerFault as fault:
                    waiting.append(work)
                    await self._judge_fault(client, work, fault)
            await self._watch(client, waiting)

    def _group(self, request: RolloutRequest) -> list[_Work]:
        is_long = len(request.prompt.token_ids) >= SHARED_PROMPT_TOKENS
        cached = asyncio.Event() if self._limits.share_prompts and is_long else None
        return [
            _Work(request, index, prompt_cached=cached, leads=not place) for place, index in enumerate(request.members)
        ]

    def _send(self, client: GenerationClient, work: _Work) -> None:
        self._number += 1
        request = work.request
        # A number of its own for every sending: an answer to an earlier one can never be taken for this one's.
        work.name = f"{request.id}/{work.index}/{self._number}"
        work.heard_at, work.has_begun = time.monotonic(), False
        task = asyncio.create_task(self._ask(client, work))
        if work.leads:
            task.add_done_callback(work.release)  # whatever became of it
        self._running[task] = work

    async def _ask(self, client: GenerationClient, work: _Work) -> Answer:
        if work.is_waiting and work.prompt_cached is not None:
            await work.prompt_cached.wait()
            work.heard_at = time.monotonic()
        request = work.request
        if request.id in self._aborted:
            return Answer((), (), "abort", ())
        seed = answer_seed(request.seed, request.prompt.id, work.index)
        return await client.generate(work.name, request.prompt.token_ids, request.sampling, seed=seed, heard=work.heard)

    async def _judge_fault(self, client: GenerationClient, work: _Work, fault: ServerFault) -> None:
        """One answer was spoiled: is it the server, or only this answer?"""
        work.attempt += 1
        assert self.life is not None
        if not self.life.process.is_running:
            raise _Lost(f"its process ended; {fault}")
        if work.attempt >= MAX_ATTEMPTS:
            raise _Lost(f"it spoiled an answer {work.attempt} times; the last time: {fault}")
        if not await client.is_healthy(deadline_seconds=max(_PROBE_SECONDS, self._limits.stall_seconds)):
            raise _Lost(f"it does not generate; {fault}")

    async def _watch(self, client: GenerationClient, waiting: deque[_Work]) -> None:
        """Find a server that hangs, and an answer that a live server has forgotten."""
        if self.life is None or self.life.is_paused:
            return
        limit, now = self._limits.stall_seconds, time.monotonic()
        silence = now - client.heard_at
        if silence > limit:
            if not await client.is_healthy(deadline_seconds=max(limit, _PROBE_SECONDS)):
                raise _Lost(f"no token for {silence:.0f} s and no answer to a probe")
            client.heard_at = now  # it works on something long
        silent = [
            (task, work)
            for task, work in self._running.items()
            if not work.is_waiting and now - work.heard_at > limit * (1 if work.has_begun else FIRST_TOKEN_FACTOR)
        ]
        for task, work in silent:
            del self._running[task]
            await self._stop(client, task, work)
            waiting.append(work)
            fault = ServerFault(
                f"{work.name}: no token for {now - work.heard_at:.0f} s while the server answers others"
            )
            await self._judge_fault(client, work, fault)

    async def _stop(self, client: GenerationClient, task: "asyncio.Task[Answer]", work: _Work) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.abort(work.name)

    async def _drop_all(self, client: GenerationClient, *, is_lost: bool) -> None:
        """End what still runs; a server that goes on must not go on with answers that nobody wants."""
        running, self._running = self._running, {}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if not is_lost:
            await asyncio.gather(*(client.abort(work.name) for work in running.values()))

    def _rollout(self, work: _Work, answer: Answer) -> Rollout:
        assert self.life is not None
        unknown = [span.version for span in answer.versions if not 0 <= span.version <= self.life.version]
        if unknown:
            raise ServerFault(f"{work.name}: sampled by version {unknown[0]}, and {self.life.version} was published")
        self._count(num_prompt_tokens=len(work.request.prompt.token_ids), num_new_tokens=len(answer.token_ids))
        return Rollout(
            work.request.prompt.id,
            work.index,
            answer.token_ids,
            answer.logprobs,
            answer.finish_reason,
            answer.versions,
            self._decode(answer.token_ids),
        )

    def _refuse_too_long(self, request: RolloutRequest) -> None:
        needed = len(request.prompt.token_ids) + request.sampling.max_new_tokens
        if needed > self._limits.max_sequence_tokens:
            raise ValueError(
                f"prompt {request.prompt.id}: {len(request.prompt.token_ids)} tokens and "
                f"modules.rollout.max_new_tokens {request.sampling.max_new_tokens} are more than the "
                f"{self._limits.max_sequence_tokens} that the engine was built for"
            )

    def _count(self, **counted: float) -> None:
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + value for name, value in counted.items()}
        )


def _as_requests(works: Sequence[_Work]) -> list[RolloutRequest]:
    """One request per prompt, for the members that are still wanted."""
    indices: dict[str, list[int]] = {}
    requests = {work.request.id: work.request for work in works}
    for work in works:
        indices.setdefault(work.request.id, []).append(work.index)
    return [replace(requests[name], indices=tuple(sorted(members))) for name, members in indices.items()]
