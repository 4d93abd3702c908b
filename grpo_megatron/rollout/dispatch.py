"""Who generates what: tickets for the prompts of a step, and the driver that collects their rollouts in time."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from grpo_megatron.batch import Prompt, Rollout
from grpo_megatron.rollout.base import RequestSource, RolloutEngine, RolloutRequest, SamplingSettings

ABORT_SECONDS = 30.0
"""After the deadline an engine has this long to hand over what it has."""
_NAMED = 10


class SharedCounter(Protocol):
    """A counter that all replicas see; `parallel.store.SharedStore` is one."""

    def add(self, key: str, amount: int) -> int:
        """Add atomically; returns the new value."""


class TicketQueue(RequestSource, Protocol):
    """A source that remembers what it gave out and can be closed early."""

    @property
    def taken(self) -> Sequence[RolloutRequest]: ...

    def close(self) -> None:
        """From now on there are no more tickets."""


def make_requests(
    prompts: Sequence[Prompt], *, num_rollouts: int, sampling: SamplingSettings, seed: int, name: str
) -> tuple[RolloutRequest, ...]:
    """One ticket per prompt; `name` (`step-7`, `evaluation`) makes their ids unlike those of other calls.

    Raises:
        ValueError: a prompt id comes twice, so that its answers would be the same draws.
    """
    counts = Counter(prompt.id for prompt in prompts)
    repeated = sorted(prompt_id for prompt_id, count in counts.items() if count > 1)
    if repeated:
        raise ValueError(
            f"data.prompts: {name} has prompt ids more than once: {', '.join(repeated[:_NAMED])}; give every line an "
            "id of its own, and lower modules.rollout.batch_size if there are fewer prompts than that"
        )
    return tuple(RolloutRequest(f"{name}/{prompt.id}", prompt, num_rollouts, sampling, seed) for prompt in prompts)


class StaticTickets:
    """Engine e gets tickets e, e + engines, ...: the same in every run, however fast the engines are."""

    def __init__(self, requests: Sequence[RolloutRequest], *, engine: int, num_engines: int) -> None:
        self._open = list(requests[engine::num_engines])
        self.taken: list[RolloutRequest] = []

    def take(self, max_rollouts: int) -> Sequence[RolloutRequest] | None:
        if not self._open:
            return None
        count = max(1, _fitting(self._open, max_rollouts))
        tickets, self._open = self._open[:count], self._open[count:]
        self.taken += tickets
        return tickets

    def close(self) -> None:
        self._open = []


class SharedTickets:
    """All engines draw from one counter, so that a slow engine takes less.

    A call claims at most its share of what is left (remaining / engines, "guided self-scheduling", Polychronopoulos
    and Kuck 1987): an engine with much room that comes first does not leave the others without work.
    """

    def __init__(
        self, requests: Sequence[RolloutRequest], *, counter: SharedCounter, key: str, num_engines: int
    ) -> None:
        """Args: key: the counter's name, new for every queue; the same requests on every engine's leader."""
        self._requests = requests
        self._counter = counter
        self._key = key
        self._num_engines = num_engines
        self._is_over = False
        self.taken: list[RolloutRequest] = []

    def take(self, max_rollouts: int) -> Sequence[RolloutRequest] | None:
        if self._is_over:
            return None
        left = self._requests[self._counter.add(self._key, 0) :]
        share = -(-len(left) // self._num_engines)
        count = max(1, min(share, _fitting(left, max_rollouts)))
        end = self._counter.add(self._key, count)
        tickets = self._requests[end - count : end]
        self._is_over = not tickets
        self.taken += tickets
        return tickets or None

    def close(self) -> None:
        self._is_over = True


class ResumedTickets:
    """What a lost engine left open comes first, then the rest of its queue."""

    def __init__(self, unfinished: Sequence[RolloutRequest], rest: TicketQueue) -> None:
        self._unfinished = StaticTickets(unfinished, engine=0, num_engines=1)
        self._rest = rest

    @property
    def taken(self) -> Sequence[RolloutRequest]:
        """Of the whole queue: the unfinished were taken from it before."""
        return self._rest.taken

    def take(self, max_rollouts: int) -> Sequence[RolloutRequest] | None:
        return self._unfinished.take(max_rollouts) or self._rest.take(max_rollouts)

    def close(self) -> None:
        self._unfinished.close()
        self._rest.close()


def _fitting(requests: Sequence[RolloutRequest], max_rollouts: int) -> int:
    """How many of the next requests have at most `max_rollouts` answers together."""
    total = 0
    for count, request in enumerate(requests):
        total += len(request.members)
        if total > max_rollouts:
            return count
    return len(requests)


def collect(
    engine: RolloutEngine,
    tickets: TicketQueue,
    *,
    on_rollout: Callable[[Prompt, Rollout], None],
    prompts: Mapping[str, Prompt],
    deadline_seconds: float,
    what: str,
    is_leader: bool = True,
    rollouts: list[Rollout] | None = None,
) -> list[Rollout]:
    """Let the engine answer this queue's tickets. Collective over the embedded engine's model-parallel group.

    Args:
        on_rollout: called as each rollout ends, while the others still run; must not block for long.
        prompts: by id, for `on_rollout`.
        what: named in errors, such as `rollout of step 7`.
        is_leader: only the leader knows the tickets and looks at the clock; other ranks follow the engine.
        rollouts: where they go, in the order in which they end; those that came before an engine was lost are in it.

    Raises:
        EngineRestarted: on the leader, as the engine raised it.
        TimeoutError: on the leader, after the deadline, naming the prompts; the engine was told to stop before.
        RuntimeError: on the leader, if a rollout is missing or came twice although the engine says it is done.
    """
    rollouts = [] if rollouts is None else rollouts
    return asyncio.run(_collect(engine, tickets, on_rollout, prompts, deadline_seconds, what, is_leader, rollouts))


async def _collect(
    engine: RolloutEngine,
    tickets: TicketQueue,
    on_rollout: Callable[[Prompt, Rollout], None],
    prompts: Mapping[str, Prompt],
    deadline_seconds: float,
    what: str,
    is_leader: bool,
    rollouts: list[Rollout],
) -> list[Rollout]:
    async def consume() -> None:
        async with aclosing(engine.generate(tickets)) as stream:  # type: ignore[type-var]
            async for rollout in stream:
                rollouts.append(rollout)
                on_rollout(prompts[rollout.prompt_id], rollout)

    consuming = asyncio.create_task(consume())
    await asyncio.wait({consuming}, timeout=deadline_seconds if is_leader else None)
    if consuming.done():
        consuming.result()
        if is_leader:
            _refuse_incomplete(tickets.taken, rollouts, what)
        return rollouts
    in_time = list(rollouts)
    tickets.close()
    await engine.abort([request.id for request in tickets.taken])
    await asyncio.wait({consuming}, timeout=ABORT_SECONDS)
    consuming.cancel()
    await asyncio.gather(consuming, return_exceptions=True)
    missing = missing_rollouts(tickets.taken, in_time)
    total = sum(request.num_rollouts for request in tickets.taken)
    raise TimeoutError(
        f"{what}: {len(missing)} of {total} rollouts missing after {deadline_seconds:.0f} s: prompt ids "
        f"{_names(missing)}; raise run.phase_deadline_seconds or lower modules.rollout.max_new_tokens"
    )


def missing_rollouts(requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> list[tuple[str, int]]:
    """(prompt id, index) of every answer that was asked for and is not there."""
    there = {(rollout.prompt_id, rollout.index) for rollout in rollouts}
    asked = [(request.prompt.id, index) for request in requests for index in range(request.num_rollouts)]
    return [answer for answer in asked if answer not in there]


def _refuse_incomplete(requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout], what: str) -> None:
    missing = missing_rollouts(requests, rollouts)
    total = sum(request.num_rollouts for request in requests)
    if missing:
        raise RuntimeError(
            f"{what}: the engine dropped {len(missing)} of {total} rollouts: prompt ids {_names(missing)}"
        )
    if len(rollouts) != total:
        raise RuntimeError(f"{what}: the engine gave {len(rollouts)} rollouts where {total} were asked for")


def _names(missing: Sequence[tuple[str, int]]) -> str:
    ids = list(dict.fromkeys(prompt_id for prompt_id, _ in missing))
    return ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")
