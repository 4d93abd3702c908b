"""The embedded rollout engine: generates with the trainer's own modules, so publishing has nothing to copy."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import numpy as np

from grpo_megatron.batch import FinishReason, Prompt, RewardSpec, Rollout
from grpo_megatron.rollout.base import (
    EngineCapabilities,
    EngineHealth,
    EnginePart,
    EnginePlace,
    EngineStats,
    RequestSource,
    RolloutRequest,
    SamplingSettings,
)
from grpo_megatron.rollout.megatron.admission import Admission
from grpo_megatron.rollout.megatron.cache import KeyValueCache
from grpo_megatron.rollout.megatron.forward import StageForward, borrowed_for_generation
from grpo_megatron.rollout.megatron.lockstep import Commands, Lockstep
from grpo_megatron.rollout.megatron.rows import BlockCopies, Row, StepPlan
from grpo_megatron.rollout.megatron.sampling import Draws, Sampled, sample

IDLE_SECONDS = 0.01
"""Between two questions for requests while nothing runs: ranks that wait for the leader's word wait no longer."""


class MegatronEngine:
    """See `rollout.base.RolloutEngine`. Every rank of a model-parallel group calls every method, in the same order."""

    needs_weights = False
    """They are the trainer's."""

    def __init__(
        self,
        *,
        model: object,
        forward: StageForward,
        cache: KeyValueCache,
        admission: Admission,
        lockstep: Lockstep,
        place: EnginePlace,
        vocab_size: int,
        decode: Callable[[Sequence[int]], str],
        capabilities: EngineCapabilities,
    ) -> None:
        self.capabilities = capabilities
        self._model = model
        self._forward = forward
        self._cache = cache
        self._admission = admission
        self._lockstep = lockstep
        self.place = place
        self._vocab_size = vocab_size
        self._decode = decode
        self._policy_version = 0
        self._is_generating = False
        self._abort_wanted: set[str] = set()
        self._counted = EngineStats(0, 0, 0.0, 0)

    async def generate(self, requests: RequestSource) -> AsyncIterator[Rollout]:
        """Stream rollouts as they end. Collective over the model-parallel group; the source is asked on its leader.

        Between two steps other coroutines run: rewards are handed out, requests aborted. The modules stay in
        evaluation mode until the stream is over or closed.
        """
        steps = self._run(requests)
        try:
            for finished in steps:
                for rollout in finished:
                    yield rollout
                await asyncio.sleep(IDLE_SECONDS if self._admission.is_idle else 0)
        finally:
            steps.close()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Takes effect before the next step of the stream. What the leader is told counts."""
        self._abort_wanted.update(request_ids)

    def sleep(self, parts: Sequence[EnginePart]) -> None:
        """`kv_cache`: its memory is given back. `weights`: nothing to do, they are the trainer's."""
        assert not self._is_generating, "the engine cannot sleep while it generates"
        if "kv_cache" in parts:
            self._cache.free()

    def wake(self, parts: Sequence[EnginePart]) -> None:
        if "kv_cache" in parts:
            self._cache.allocate()

    @property
    def cache_bytes(self) -> int:
        """Memory that the key-value cache holds now."""
        return self._cache.num_bytes

    def set_version(self, policy_version: int) -> None:
        self._policy_version = policy_version

    def health(self) -> EngineHealth:
        """Generate two tokens and look whether they are finite. Collective over the model-parallel group."""
        if self._is_generating:
            return EngineHealth(True, self._policy_version, "generating")
        if not self._cache.is_allocated:
            return EngineHealth(True, self._policy_version, "kv_cache asleep")
        counted = self._counted
        prompt = Prompt("health", (0,), "", RewardSpec("none"))
        probe = RolloutRequest("health", prompt, 1, SamplingSettings(max_new_tokens=2, temperature=0.0), seed=0)
        try:
            rollouts = [rollout for finished in self._run(_Once(probe)) for rollout in finished]
        except FloatingPointError as error:
            return EngineHealth(False, self._policy_version, str(error))
        finally:
            self._counted = counted
        return EngineHealth(len(rollouts) == 1, self._policy_version, f"{len(rollouts)} of 1 test answers came")

    def stats(self) -> EngineStats:
        counted, self._counted = self._counted, EngineStats(0, 0, 0.0, 0)
        return counted

    def close(self) -> None:
        self._cache.free()

    def _run(self, requests: RequestSource) -> Iterator[list[Rollout]]:
        """One item per step: the rollouts that ended in it, often none."""
        assert not self._is_generating, "one stream at a time"
        if not self._cache.is_allocated:
            raise RuntimeError("rollout: the key-value cache is asleep; call wake(['kv_cache']) before generate")
        self._is_generating = True
        self._abort_wanted.clear()
        is_over = False
        try:
            with borrowed_for_generation(self._model):
                exhausted = False
                while not (exhausted and self._admission.is_idle):
                    commands = self._lockstep.share_commands(self._next_commands(requests, exhausted))
                    if commands.state in ("refused", "failed"):
                        is_over = True
                        raise (
                            ValueError(commands.error) if commands.state == "refused" else RuntimeError(commands.error)
                        )
                    exhausted = exhausted or commands.state == "finished"
                    self._admission.enqueue(commands.requests)
                    ended = [self._to_rollout(row, "abort") for row in self._admission.abort(commands.aborted)]
                    plan = self._admission.plan()
                    yield ended if plan is None else ended + self._step(plan)
                is_over = True
        except GeneratorExit:
            # The reader gave up between two steps. Ranks that go on hear it instead of the next step's commands.
            if not is_over:
                closed = Commands("failed", error="rollout: the leader closed the stream")
                self._lockstep.share_commands(closed if self.place.is_leader else None)
            raise
        finally:
            self._admission.abort_all()
            self._is_generating = False

    def _next_commands(self, requests: RequestSource, exhausted: bool) -> Commands | None:
        """On the leader: what to do before the next step."""
        if not self.place.is_leader:
            return None
        aborted, self._abort_wanted = tuple(sorted(self._abort_wanted)), set()
        room = 0 if exhausted else self._admission.num_free_rows
        try:
            taken = requests.take(room) if room else ()
            for request in taken or ():
                self._check(request)
        except ValueError as error:
            return Commands("refused", error=str(error))
        except Exception as error:  # noqa: BLE001 the others must hear of it, whatever it is
            return Commands("failed", error=f"rollout: the leader got no requests: {type(error).__name__}: {error}")
        return Commands("finished" if taken is None else "continue", tuple(taken or ()), aborted)

    def _check(self, request: RolloutRequest) -> None:
        self._admission.check(request)
        outside = [token for token in request.prompt.token_ids if not 0 <= token < self._vocab_size]
        if outside:
            raise ValueError(
                f"prompt {request.prompt.id}: token {outside[0]} is not in the model's vocabulary of "
                f"{self._vocab_size}; the prompts were tokenised with the tokenizer of another model than model.policy"
            )

    def _step(self, plan: StepPlan) -> list[Rollout]:
        """Compute one step; returns what ended in it. Collective over the model-parallel group."""
        start = time.perf_counter()
        self._copy(plan.copies_before)
        logits = self._forward(plan)
        self._copy(plan.copies_after)
        drawn = plan.drawn_rows
        sampled = None
        if self._lockstep.is_sampler:
            assert logits is not None
            sampled = sample(logits, _draws(plan), vocab_size=self._vocab_size)
        sampled = self._lockstep.share_sampled(sampled, len(drawn))
        self._refuse_nan(drawn, sampled)
        self._admission.advance(plan)
        for (row, _), token, logprob in zip(drawn, sampled.token_ids.tolist(), sampled.logprobs.tolist(), strict=True):
            row.append(token, logprob, self._policy_version)
        ended = [(row, reason) for row, _ in drawn if (reason := row.finish_reason) is not None]
        rollouts = [self._to_rollout(row, reason) for row, reason in ended]
        self._admission.finish([row for row, _ in ended])
        self._count(plan, len(drawn), time.perf_counter() - start)
        return rollouts

    def _copy(self, copies: BlockCopies) -> None:
        if copies.sources:
            self._cache.copy_blocks(list(copies.sources), list(copies.destinations))

    def _refuse_nan(self, drawn: list[tuple[Row, int]], sampled: Sampled) -> None:
        bad = np.flatnonzero(~np.isfinite(sampled.logprobs))
        if bad.size:
            self._cache.clear()  # or the next answers would read it through their masks
            row = drawn[int(bad[0])][0]
            raise FloatingPointError(
                f"rollout of prompt {row.request.prompt.id}, answer {row.index}: the log-prob of token "
                f"{len(row.token_ids)} is not finite ({bad.size} of {len(drawn)} answers in this step); the policy's "
                f"weights of version {self._policy_version} or its activations are not"
            )

    def _to_rollout(self, row: Row, reason: FinishReason) -> Rollout:
        token_ids = tuple(row.token_ids)
        return Rollout(
            prompt_id=row.request.prompt.id,
            index=row.index,
            token_ids=token_ids,
            logprobs=tuple(row.logprobs),
            finish_reason=reason,
            versions=tuple(row.versions),
            text=self._decode(token_ids),
        )

    def _count(self, plan: StepPlan, num_new_tokens: int, seconds: float) -> None:
        before = self._counted
        self._counted = EngineStats(
            num_prompt_tokens=before.num_prompt_tokens + plan.num_tokens - len(plan.decode),
            num_new_tokens=before.num_new_tokens + num_new_tokens,
            busy_seconds=before.busy_seconds + seconds,
            num_steps=before.num_steps + 1,
        )


class _Once:
    """A source of one request."""

    def __init__(self, request: RolloutRequest) -> None:
        self._requests = [request]

    def take(self, max_rollouts: int) -> list[RolloutRequest] | None:
        return [self._requests.pop()] if self._requests else None


def _draws(plan: StepPlan) -> Draws:
    drawn = plan.drawn_rows
    sampling = [row.request.sampling for row in plan.decode] + [
        prompt.rows[0].request.sampling for prompt in plan.prompts
    ]
    return Draws(
        rows=np.array([place for _, place in drawn], np.int64),
        uniforms=np.array([row.uniforms[len(row.token_ids)] for row, _ in drawn], np.float64),
        temperatures=np.array([settings.temperature for settings in sampling], np.float32),
        top_p=np.array([settings.top_p for settings in sampling], np.float32),
        top_k=np.array([settings.top_k for settings in sampling], np.int64),
    )
