"""One round of generation on all engines: hand out tickets, stream what ends, wait until everybody is done."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from grpo_megatron.batch import Prompt, Rollout
from grpo_megatron.monitor.progress import Progress
from grpo_megatron.parallel.errors import RankFailure
from grpo_megatron.parallel.store import SharedStore
from grpo_megatron.rollout.base import EngineRestarted, RolloutEngine, RolloutRequest, SamplingSettings
from grpo_megatron.rollout.dispatch import (
    ResumedTickets,
    SharedTickets,
    StaticTickets,
    TicketQueue,
    collect,
    make_requests,
)


@dataclass(frozen=True)
class Generated:
    rollouts: tuple[Rollout, ...]
    """Of this rank's engine, on its leader; empty elsewhere, so that nothing counts twice."""
    seconds: float
    """Until this rank's engine was done; waiting for the others is extra."""
    num_restarts: int
    """How often an engine of the run was lost and started again meanwhile."""


@dataclass(frozen=True)
class _Round:
    """What stays the same when an engine is lost in the middle."""

    name: str
    end: float
    """Of the deadline, on the monotonic clock."""
    prompts: Mapping[str, Prompt]
    rollouts: list[Rollout] = field(default_factory=list)


class Generation:
    """Drives this rank's engine. No rank sits in a collective while another one still generates.

    Args:
        restore_weights: brings the current version to engines that lost it. Collective over the world.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        store: SharedStore,
        *,
        assignment: Literal["static", "shared"],
        deadline_seconds: float,
        open_progress: Callable[[str, int], Progress],
        restore_weights: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._store = store
        self._assignment = assignment
        self._deadline_seconds = deadline_seconds
        self._open_progress = open_progress
        self._restore_weights = restore_weights

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        num_rollouts: int,
        sampling: SamplingSettings,
        seed: int,
        name: str,
        on_rollout: Callable[[Prompt, Rollout], None],
    ) -> Generated:
        """Answer every prompt `num_rollouts` times. Collective over the world.

        An engine that is lost restarts while the others go on; when they are done, all ranks bring it the weights
        again and it answers what it had left open.

        Args:
            name: unlike that of any other call in this process; the same on every rank.
            on_rollout: called on the leader of each engine as rollouts end.

        Raises:
            TimeoutError: an engine or a rank did not get there in time; names prompts or ranks.
            RankFailure: generation failed on another rank.
        """
        begin = time.monotonic()
        place = self._engine.place
        round_ = _Round(name, begin + self._deadline_seconds, {prompt.id: prompt for prompt in prompts})
        tickets = source = self._tickets(prompts, num_rollouts, sampling, seed, name)
        num_restarts = 0
        with self._open_progress(name, len(prompts) * num_rollouts) as progress:
            ended = self._teller(name, progress, on_rollout)
            for attempt in count():
                meeting = f"{name}/{attempt}"
                unfinished = self._collect(round_, source, ended, meeting)
                if unfinished is not None:
                    source = ResumedTickets(unfinished, tickets)
                    self._store.add(f"{meeting}/lost", 1)
                seconds = time.monotonic() - begin
                what = f"{name}: end of generation"
                self._store.meet(meeting, what=what, deadline_seconds=self._deadline_seconds)
                num_lost = self._store.add(f"{meeting}/lost", 0)
                if num_lost == 0:
                    break
                num_restarts += num_lost
                self._restore_weights()
        return Generated(tuple(round_.rollouts) if place.is_leader else (), seconds, num_restarts)

    def _collect(
        self, round_: "_Round", source: TicketQueue, ended: Callable[[Prompt, Rollout], None], meeting: str
    ) -> Sequence[RolloutRequest] | None:
        """Let this rank's engine work; returns what it left open if it was lost and is there again, else None."""
        try:
            collect(
                self._engine,
                source,
                on_rollout=ended,
                prompts=round_.prompts,
                deadline_seconds=round_.end - time.monotonic(),
                what=round_.name,
                is_leader=self._engine.place.is_leader,
                rollouts=round_.rollouts,
            )
        except EngineRestarted as lost:
            return lost.unfinished
        except Exception as error:
            self._store.fail(meeting, str(error))  # the other engines need not wait for the deadline
            if isinstance(error, RuntimeError):  # the engine lost rollouts, or cannot be restarted
                raise RankFailure(str(error)) from error
            raise
        return None

    def _teller(
        self, name: str, progress: Progress, on_rollout: Callable[[Prompt, Rollout], None]
    ) -> Callable[[Prompt, Rollout], None]:
        """Hands each ended rollout on, and shows how many have ended on all engines together."""
        num_shown = 0

        def ended(prompt: Prompt, rollout: Rollout) -> None:
            nonlocal num_shown
            if self._engine.place.is_leader:
                num_ended = self._store.add(f"{name}/ended", 1)
                progress.advance(num_ended - num_shown)
                num_shown = num_ended
                on_rollout(prompt, rollout)

        return ended

    def _tickets(
        self, prompts: Sequence[Prompt], num_rollouts: int, sampling: SamplingSettings, seed: int, name: str
    ) -> TicketQueue:
        requests = make_requests(prompts, num_rollouts=num_rollouts, sampling=sampling, seed=seed, name=name)
        place = self._engine.place
        if self._assignment == "static":
            return StaticTickets(requests, engine=place.index, num_engines=place.num_engines)
        return SharedTickets(requests, counter=self._store, key=f"{name}/tickets", num_engines=place.num_engines)
