"""Scored rollouts for the tests of packing."""

import numpy as np

from grpo_megatron.batch import FinishReason, Prompt, RewardResult, RewardSpec, Rollout, ScoredRollout


def make_prompt(name: str, tokens: tuple[int, ...]) -> Prompt:
    return Prompt(name, tokens, "", RewardSpec("number"))


def make_scored(
    prompt: Prompt,
    index: int,
    tokens: tuple[int, ...],
    *,
    loss_mask: tuple[bool, ...] = (),
    finish: FinishReason = "stop",
    score: float | None = 1.0,
    reference: bool = False,
) -> ScoredRollout:
    logprobs = tuple(-0.125 * (i + 1) for i in range(len(tokens)))
    rollout = Rollout(prompt.id, index, tokens, logprobs, finish, (), "", loss_mask)
    references = np.asarray(logprobs, np.float32) * 2 if reference else None
    return ScoredRollout(prompt, rollout, RewardResult(score), references)
