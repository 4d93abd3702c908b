"""One round of generation on all engines: hand out tickets, stream what ends, wait until everybody is done."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_megatron.batch import Prompt, Rollout
from grpo_megatron.monitor.progress import Progress
from grpo_megatron.parallel.errors import RankFailure
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.parallel.store import SharedStore
from grpo_megatron.rollout.base import RolloutEngine, SamplingSettings
from grpo_megatron.rollout.dispatch import SharedTickets, StaticTickets, TicketQueue, collect, make_requests


@dataclass(frozen=True)
class Generated:
    rollouts: tuple[Rollout, ...]
    """Of this rank's engine, on the leader of its replica; empty elsewhere, so that nothing counts twice."""
    seconds: float
    """Until this rank's engine was done; waiting for the others is extra."""


class Generation:
    """Drives this rank's engine. No rank sits in a collective while another one still generates."""

    def __init__(
        self,
        engine: RolloutEngine,
        groups: Groups,
        store: SharedStore,
        *,
        assignment: Literal["static", "shared"],
        deadline_seconds: float,
        open_progress: Callable[[str, int], Progress],
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._store = store
        self._assignment = assignment
        self._deadline_seconds = deadline_seconds
        self._open_progress = open_progress

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

        Args:
            name: unlike that of any other call in this process; the same on every rank.
            on_rollout: called on the leader of each replica as rollouts end.

        Raises:
            TimeoutError: an engine or a rank did not get there in time; names prompts or ranks.
            RankFailure: generation failed on another rank.
        """
        begin = time.monotonic()
        num_shown = 0
        with self._open_progress(name, len(prompts) * num_rollouts) as progress:

            def ended(prompt: Prompt, rollout: Rollout) -> None:
                nonlocal num_shown
                if self._groups.is_model_leader:
                    num_ended = self._store.add(f"{name}/ended", 1)  # on all engines
                    progress.advance(num_ended - num_shown)
                    num_shown = num_ended
                    on_rollout(prompt, rollout)

            try:
                rollouts = collect(
                    self._engine,
                    self._tickets(prompts, num_rollouts, sampling, seed, name),
                    on_rollout=ended,
                    prompts={prompt.id: prompt for prompt in prompts},
                    deadline_seconds=self._deadline_seconds,
                    what=name,
                    is_leader=self._groups.is_model_leader,
                )
            except Exception as error:
                self._store.fail(name, str(error))  # the other replicas need not wait for the deadline
                if isinstance(error, RuntimeError):  # the engine lost rollouts
                    raise RankFailure(str(error)) from error
                raise
        seconds = time.monotonic() - begin
        self._store.meet(name, what=f"{name}: end of generation", deadline_seconds=self._deadline_seconds)
        return Generated(tuple(rollouts) if self._groups.is_model_leader else (), seconds)

    def _tickets(
        self, prompts: Sequence[Prompt], num_rollouts: int, sampling: SamplingSettings, seed: int, name: str
    ) -> TicketQueue:
        requests = make_requests(prompts, num_rollouts=num_rollouts, sampling=sampling, seed=seed, name=name)
        groups = self._groups
        if self._assignment == "static":
            return StaticTickets(requests, replica=groups.replica, num_replicas=groups.num_replicas)
        return SharedTickets(requests, counter=self._store, key=f"{name}/tickets", num_replicas=groups.num_replicas)
