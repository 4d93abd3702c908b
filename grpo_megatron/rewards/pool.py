"""Reward workers beside the trainer: rollouts stream in while generation runs, results are collected afterwards.

Every worker process belongs to one thread, which feeds it, waits with a deadline, kills it when it hangs and starts
another in its place. Results are kept by (prompt id, index), so their order never matters.
"""

import itertools
import pickle
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from grpo_megatron.batch import Prompt, RewardResult, Rollout
from grpo_megatron.config.schema import RewardsSection
from grpo_megatron.rewards.process import WorkerProcess, WorkerRefused
from grpo_megatron.rewards.values import ErrorKind, describe_error, error_kind

RolloutKey = tuple[str, int]
"""(prompt id, index in the group)."""

_RESTARTS_IN_A_ROW = 3
_LATENCIES_KEPT = 10_000


class RewardFailure(RuntimeError):
    """Under `on_error: fail` a rollout could not be scored."""

    def __init__(self, prompt_id: str, index: int, error: str) -> None:
        super().__init__(f"modules.rewards.on_error is fail: prompt {prompt_id!r}, answer {index}: {error}")
        self.prompt_id, self.index, self.error = prompt_id, index, error


@dataclass(frozen=True)
class RewardPoolStats:
    """Counters since the last call of `stats`, and two gauges.

    Example:
        >>> RewardPoolStats(64, {"timeout": 1}, 1, 0, 0, 2.5, 0.03).num_errors
        1
    """

    num_scored: int
    """Rollouts with a score, failed ones not among them."""
    errors: Mapping[ErrorKind, int]
    num_workers_replaced: int
    queue_depth: int
    """Rollouts that no worker has taken yet (gauge)."""
    num_running: int
    """Rollouts that a worker is at (gauge)."""
    busy_seconds: float
    """Summed over the workers."""
    median_seconds: float
    """Of one rollout in its worker; 0 if there was none."""

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())


@dataclass(eq=False)
class _Task:
    key: RolloutKey
    sequence: int
    request: bytes


class RewardPool:
    """Scores rollouts in worker processes. To be closed, best by `with`."""

    def __init__(
        self, section: RewardsSection, *, names: Sequence[str] = (), start_deadline_seconds: float = 120.0
    ) -> None:
        """Start the workers and wait until they can score.

        Args:
            names: every reward that prompts name, so that workers load no other; none: the section's default.

        Raises:
            ValueError: a reward cannot be built, with the reason.
            RuntimeError: a worker does not start.
        """
        self._section = section
        self._names = tuple(sorted(set(names) or {section.default}))
        self._start_deadline_seconds = start_deadline_seconds
        self._changed = threading.Condition()
        self._pending: deque[_Task] = deque()
        self._outstanding: dict[RolloutKey, _Task] = {}
        self._running: dict[int, tuple[_Task, WorkerProcess]] = {}
        self._finished: dict[RolloutKey, RewardResult] = {}
        self._sequences = itertools.count()
        self._closing = False
        self._num_ready = 0
        self._num_owners = section.workers
        self._start_failure: Exception | None = None
        self._reset_counters()
        self._owners = [
            threading.Thread(target=self._own_worker, args=(slot,), daemon=True, name=f"reward worker {slot}")
            for slot in range(section.workers)
        ]
        for owner in self._owners:
            owner.start()
        self._await_workers()

    def submit(self, prompt: Prompt, rollout: Rollout) -> None:
        """Queue one rollout; does not wait for a worker.

        Raises:
            RuntimeError: no worker is left and none can be started.
        """
        key = (rollout.prompt_id, rollout.index)
        assert prompt.id == rollout.prompt_id, f"prompt {prompt.id} given with a rollout of {rollout.prompt_id}"
        assert prompt.reward.name in self._names, f"reward {prompt.reward.name} of {prompt.id} not named at the start"
        sequence = next(self._sequences)
        task = _Task(key, sequence, pickle.dumps((sequence, prompt, rollout)))
        with self._changed:
            assert not self._closing, "submit after close"
            assert key not in self._outstanding and key not in self._finished, f"rollout {key} submitted twice"
            if self._num_owners == 0:
                raise RuntimeError(f"modules.rewards: no reward worker is left: {self._start_failure}")
            self._outstanding[key] = task
            self._pending.append(task)
            self._changed.notify_all()

    def collect(self, deadline_seconds: float) -> dict[RolloutKey, RewardResult]:
        """Wait for everything submitted so far and hand it over, the error policy applied.

        What has no score at the deadline is given up as a time-out, and its worker is replaced.

        Raises:
            RewardFailure: a rollout failed and the policy is `fail`.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._outstanding, timeout=deadline_seconds)
            if self._outstanding:
                waiting = f"no score after {deadline_seconds:g} s of collecting, {len(self._pending)} queued"
                for task in list(self._outstanding.values()):
                    self._settle(task, RewardResult(None, error=describe_error("timeout", waiting)))
                self._pending.clear()
                for _, worker in self._running.values():
                    worker.interrupt()
            finished, self._finished = self._finished, {}
        return {key: self._apply_policy(key, finished[key]) for key in sorted(finished)}

    def stats(self) -> RewardPoolStats:
        with self._changed:
            stats = RewardPoolStats(
                num_scored=self._num_scored,
                errors=dict(self._errors),
                num_workers_replaced=self._num_replaced,
                queue_depth=len(self._pending),
                num_running=len(self._running),
                busy_seconds=self._busy_seconds,
                median_seconds=statistics.median(self._seconds) if self._seconds else 0.0,
            )
            self._reset_counters()
        return stats

    def close(self) -> None:
        """Kill every worker and wait until it is gone. May be called twice."""
        with self._changed:
            self._closing = True
            self._pending.clear()
            for _, worker in self._running.values():
                worker.interrupt()
            self._changed.notify_all()
        deadline = self._start_deadline_seconds + 30.0  # a replacement may be starting just now
        for owner in self._owners:
            owner.join(deadline)
            assert not owner.is_alive(), f"{owner.name} did not end within {deadline:g} s"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reset_counters(self) -> None:
        self._num_scored = 0
        self._errors: Counter[ErrorKind] = Counter()
        self._num_replaced = 0
        self._busy_seconds = 0.0
        self._seconds: deque[float] = deque(maxlen=_LATENCIES_KEPT)

    def _await_workers(self) -> None:
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._start_failure is not None or self._num_ready == len(self._owners),
                timeout=self._start_deadline_seconds + 10.0,
            )
            failure = self._start_failure
        if failure is None and done:
            return
        self.close()
        if isinstance(failure, WorkerRefused):
            raise ValueError(f"modules.rewards: {failure}") from failure
        raise RuntimeError(f"modules.rewards: {failure or 'the reward workers did not start in time'}")

    def _own_worker(self, slot: int) -> None:
        """Life of one owner thread; the last one to leave answers for what nobody will score any more."""
        try:
            self._serve(slot)
        except Exception as error:
            self._start_failure = error
            raise
        finally:
            with self._changed:
                self._num_owners -= 1
                if self._num_owners == 0:
                    reason = f"no reward worker is left: {self._start_failure}"
                    for task in list(self._outstanding.values()):
                        self._settle(task, RewardResult(None, error=describe_error("died", reason)))
                    self._pending.clear()

    def _serve(self, slot: int) -> None:
        worker = self._start_worker(attempts=1)
        while worker is not None:
            task = self._next_task(slot, worker)
            if task is None:
                worker.kill()
                return
            started = time.monotonic()
            result, alive = worker.score(task.sequence, task.request, self._section.timeout_seconds)
            with self._changed:
                del self._running[slot]
                self._record_seconds(time.monotonic() - started)
                self._settle(task, result)
                closing = self._closing
            if not alive:
                worker = None if closing else self._start_worker(attempts=_RESTARTS_IN_A_ROW)
                with self._changed:
                    self._num_replaced += worker is not None

    def _start_worker(self, *, attempts: int) -> WorkerProcess | None:
        failure: Exception | None = None
        for attempt in range(attempts):
            try:
                worker = WorkerProcess(self._names, start_deadline_seconds=self._start_deadline_seconds)
            except (OSError, RuntimeError, ValueError) as error:  # TimeoutError is an OSError
                failure = error
                time.sleep(0.2 * attempt)
                continue
            with self._changed:
                self._num_ready += 1
                self._changed.notify_all()
            return worker
        with self._changed:
            self._start_failure = failure
            self._changed.notify_all()
        return None

    def _next_task(self, slot: int, worker: WorkerProcess) -> _Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or bool(self._pending))
            if self._closing:
                return None
            task = self._pending.popleft()
            self._running[slot] = (task, worker)
            return task

    def _record_seconds(self, seconds: float) -> None:
        self._busy_seconds += seconds
        self._seconds.append(seconds)

    def _settle(self, task: _Task, result: RewardResult) -> None:
        """Keep the result, unless the task was given up in the meantime. The lock is held."""
        if self._outstanding.get(task.key) is not task:
            return
        del self._outstanding[task.key]
        self._finished[task.key] = result
        if result.error is None:
            self._num_scored += 1
        else:
            self._errors[error_kind(result.error)] += 1
        self._changed.notify_all()

    def _apply_policy(self, key: RolloutKey, result: RewardResult) -> RewardResult:
        if result.error is None:
            return result
        match self._section.on_error:
            case "zero":
                return replace(result, score=0.0)
            case "drop":
                return replace(result, score=None)
            case "fail":
                raise RewardFailure(key[0], key[1], result.error)
