"""Greedy accuracy on held-out prompts, before, during and after training."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import reduce
from typing import Any

from grpo_megatron.batch import Prompt, Rollout
from grpo_megatron.config.schema import MonitorSection, RolloutSection
from grpo_megatron.parallel.collectives import agree, gather_objects
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.rewards.pool import RewardFailure, RewardPool
from grpo_megatron.rewards.text import contains_number
from grpo_megatron.rollout.base import SamplingSettings
from grpo_megatron.scheduler.generation import Generation


@dataclass(frozen=True)
class EvaluationResult:
    """What one pass over the held-out prompts gave.

    Example:
        >>> EvaluationResult(40, 243, 0.75, 0.76, 0.98, 0.0, 9.5).accuracy
        0.75
    """

    version: int
    num_problems: int
    accuracy: float
    """Mean reward of the answers that could be scored, each cut where a training rollout would have been cut."""
    anywhere: float | None
    """Share of answers that hold the right number anywhere, uncut; None if the answers are not numbers."""
    ended_share: float
    """Share of answers that ended by themselves before the cut."""
    error_share: float
    """Share of answers whose scorer failed; with `on_error: zero` they count as 0 in the accuracy."""
    seconds: float


class Evaluation:
    """Generates greedily with the run's own engine and scores with its own reward workers. A `Stateful`."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        generation: Generation,
        pool: RewardPool | None,
        groups: Groups,
        *,
        rollout: RolloutSection,
        monitor: MonitorSection,
        sampling: SamplingSettings,
        decode: Callable[[Sequence[int]], str],
        deadline_seconds: float,
    ) -> None:
        self._prompts = tuple(prompts)
        self._generation = generation
        self._pool = pool
        self._groups = groups
        self._monitor = monitor
        self._max_new_tokens = rollout.max_new_tokens
        longest = monitor.evaluation_max_new_tokens or rollout.max_new_tokens
        self._sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=longest)
        self._decode = decode
        self._deadline_seconds = deadline_seconds
        self.on_result: Callable[[EvaluationResult], None] = lambda result: None
        self.before: EvaluationResult | None = None
        self.latest: EvaluationResult | None = None

    def state_dict(self) -> dict[str, Any]:
        return {
            name: None if result is None else asdict(result)
            for name, result in (("before", self.before), ("latest", self.latest))
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.before, self.latest = (
            None if state[name] is None else EvaluationResult(**state[name]) for name in ("before", "latest")
        )

    def is_due(self, version: int, *, num_steps: int) -> bool:
        """Whether to evaluate this version: at the start, at the end, every so many steps; never twice."""
        if self.latest is not None and self.latest.version == version:
            return False
        every = self._monitor.evaluate_every_steps
        at_border = (version == 0 and self._monitor.evaluate_at_start) or (
            version == num_steps and self._monitor.evaluate_at_end
        )
        return at_border or (every > 0 and version > 0 and version % every == 0)

    def run(self, version: int) -> EvaluationResult:
        """Generate, score, average. Collective over the world.

        Raises:
            RankFailure: on every rank, if a reward failed and the policy is `fail`.
        """
        begin = time.monotonic()
        finished = self._generation.run(
            self._prompts,
            num_rollouts=1,
            sampling=self._sampling,
            seed=0,
            name=f"evaluation of version {version}",
            on_rollout=self._submit,
        )
        parts = gather_objects(self._score(finished.rollouts, version), self._groups.world)
        total = reduce(_Counts.plus, parts)
        assert total.answers == len(self._prompts), f"{total.answers} of {len(self._prompts)} prompts were answered"
        result = EvaluationResult(
            version=version,
            num_problems=total.answers,
            accuracy=total.reward / max(1, total.scored),
            anywhere=total.anywhere / total.numbers if total.numbers else None,
            ended_share=total.ended / total.answers,
            error_share=total.errors / total.answers,
            seconds=time.monotonic() - begin,
        )
        self.before = self.before or result
        self.latest = result
        self.on_result(result)
        return result

    def _submit(self, prompt: Prompt, rollout: Rollout) -> None:
        if self._pool is not None:
            self._pool.submit(prompt, self._cut(rollout))

    def _cut(self, rollout: Rollout) -> Rollout:
        """As a training rollout would have ended."""
        limit = self._max_new_tokens
        if rollout.num_tokens <= limit:
            return rollout
        ids = rollout.token_ids[:limit]
        return replace(
            rollout,
            token_ids=ids,
            logprobs=rollout.logprobs[:limit],
            loss_mask=rollout.loss_mask[:limit],
            finish_reason="length",
            text=self._decode(ids),
        )

    def _score(self, rollouts: Sequence[Rollout], version: int) -> "_Counts":
        """This rank's share. Collective over the world."""
        error, results = None, {}
        if self._pool is not None:
            try:
                results = self._pool.collect(self._deadline_seconds)
            except RewardFailure as failure:
                error = str(failure)
            self._pool.stats()  # what failed here must not count for the next training step
        agree(error, self._groups.world, f"rewards of the evaluation of version {version}")
        specs = {prompt.id: prompt.reward for prompt in self._prompts}
        counts = _Counts()
        for rollout in rollouts:
            spec, result = specs[rollout.prompt_id], results[rollout.prompt_id, rollout.index]
            is_number = spec.name == "number" and result.error is None
            counts = counts.plus(
                _Counts(
                    answers=1,
                    scored=int(result.score is not None),
                    reward=result.score or 0.0,
                    errors=int(result.error is not None),
                    ended=int(self._cut(rollout).finish_reason == "stop"),
                    numbers=int(is_number),
                    anywhere=int(is_number and contains_number(rollout.text, spec.answer)),
                )
            )
        return counts


@dataclass(frozen=True)
class _Counts:
    answers: int = 0
    scored: int = 0
    reward: float = 0.0
    errors: int = 0
    ended: int = 0
    numbers: int = 0
    anywhere: int = 0

    def plus(self, other: "_Counts") -> "_Counts":
        return _Counts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))
