"""Prompts, requests and a driver for tests of rollout engines."""

import asyncio
import random
from collections.abc import Callable, Sequence

from grpo_megatron.batch import Prompt, RewardSpec, Rollout
from grpo_megatron.rollout.base import RolloutEngine, RolloutRequest, SamplingSettings


def make_prompt(name: str, token_ids: Sequence[int]) -> Prompt:
    return Prompt(name, tuple(token_ids), "", RewardSpec("none"))


def random_prompts(lengths: Sequence[int], *, vocab_size: int = 151, seed: int = 0) -> list[Prompt]:
    numbers = random.Random(seed)
    return [
        make_prompt(f"prompt-{place}", [numbers.randrange(3, vocab_size) for _ in range(length)])
        for place, length in enumerate(lengths)
    ]


def make_request(prompt: Prompt, num_rollouts: int = 1, *, seed: int = 1, **sampling) -> RolloutRequest:  # noqa: ANN003
    return RolloutRequest(f"test/{prompt.id}", prompt, num_rollouts, SamplingSettings(**sampling), seed)


class ListSource:
    """Gives requests in order, as many as fit; the last ones after `None` was asked `delay` times."""

    def __init__(self, requests: Sequence[RolloutRequest], *, empty_answers: int = 0) -> None:
        self._open = list(requests)
        self._empty_answers = empty_answers

    def take(self, max_rollouts: int) -> Sequence[RolloutRequest] | None:
        assert max_rollouts > 0
        if self._empty_answers:
            self._empty_answers -= 1
            return []
        if not self._open:
            return None
        taken = [self._open.pop(0)]
        while self._open and sum(one.num_rollouts for one in [*taken, self._open[0]]) <= max_rollouts:
            taken.append(self._open.pop(0))
        return taken


def run(
    engine: RolloutEngine,
    requests: Sequence[RolloutRequest],
    *,
    source: ListSource | None = None,
    on_rollout: Callable[[Rollout], object] | None = None,
) -> list[Rollout]:
    """All rollouts in the order in which they ended; `on_rollout` may return something to await."""

    async def drain() -> list[Rollout]:
        rollouts = []
        async for rollout in engine.generate(source or ListSource(requests)):
            rollouts.append(rollout)
            if on_rollout is not None and (waiting := on_rollout(rollout)) is not None:
                await waiting
        return rollouts

    return asyncio.run(drain())


def by_answer(rollouts: Sequence[Rollout]) -> dict[tuple[str, int], Rollout]:
    """(prompt id, index) -> rollout; each exactly once."""
    found = {(rollout.prompt_id, rollout.index): rollout for rollout in rollouts}
    assert len(found) == len(rollouts), "an answer came twice"
    return found
