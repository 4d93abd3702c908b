"""Policies and micro-batches for tests: a tiny model loaded from its folder, rollouts packed by hand."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grpo_megatron.batch import MicroBatch


def build_tiny_policy(folder: Path, groups, *, dtype="float32", **settings):  # noqa: ANN001, ANN003, ANN201
    """The policy of an HF folder on this rank, weights loaded."""
    from grpo_megatron.families.describe import describe
    from grpo_megatron.models.build import BuildSettings, build_policy
    from grpo_megatron.platform.device import current_platform
    from grpo_megatron.platform.kernels import choose_kernels
    from grpo_megatron.weights.load import load_hf

    description = describe(folder)
    built = BuildSettings(dtype, "float32", **settings)
    chunks = build_policy(description, built, groups, current_platform(), choose_kernels())
    load_hf(chunks, description, folder, groups=groups)
    return chunks


def pack_by_hand(
    prompt: Sequence[int],
    answers: Sequence[Sequence[int]],
    *,
    advantages: Sequence[float],
    share_prefix: bool = False,
    pad_to_multiple: int = 1,
    rollout_logprobs: Sequence[float] | None = None,
    first_rollout: int = 0,
) -> MicroBatch:
    """One prompt with its answers as one row; with a shared prefix in one block, else one block an answer."""
    tokens, positions, blocks, segments, sources, targets, rollouts = ([] for _ in range(7))
    for index, answer in enumerate(answers):
        if index == 0 or not share_prefix:
            start = len(tokens)
            tokens += prompt
            positions += range(len(prompt))
            segments += [0] * len(prompt)
            blocks += [index] * len(prompt)
        first = len(tokens)
        tokens += answer
        positions += range(len(prompt), len(prompt) + len(answer))
        segments += [index + 1 if share_prefix else 1] * len(answer)
        blocks += [blocks[-1]] * len(answer)
        sources += [start + len(prompt) - 1, *range(first, first + len(answer) - 1)]
        targets += answer
        rollouts += [first_rollout + index] * len(answer)
    padding = -len(tokens) % pad_to_multiple
    if padding:
        blocks += [blocks[-1] + 1] * padding
        tokens += [0] * padding
        positions += range(padding)
        segments += [0] * padding
    zeros = np.zeros(len(targets), np.float32)
    return MicroBatch(
        token_ids=np.array(tokens, np.int64),
        position_ids=np.array(positions, np.int64),
        block_ids=np.array(blocks, np.int32),
        segment_ids=np.array(segments, np.int32),
        target_sources=np.array(sources, np.int64),
        target_ids=np.array(targets, np.int64),
        loss_mask=np.ones(len(targets), np.float32),
        advantages=np.array([advantages[rollout - first_rollout] for rollout in rollouts], np.float32),
        rollout_logprobs=zeros if rollout_logprobs is None else np.array(rollout_logprobs, np.float32),
        reference_logprobs=None,
        proximal_logprobs=None,
        rollout_ids=np.array(rollouts, np.int32),
    )


def empty_micro_batch(num_tokens: int = 4) -> MicroBatch:
    """Padding only: what a rank without any target takes part with."""
    none = np.zeros(0, np.float32)
    return MicroBatch(
        token_ids=np.zeros(num_tokens, np.int64),
        position_ids=np.arange(num_tokens),
        block_ids=np.zeros(num_tokens, np.int32),
        segment_ids=np.zeros(num_tokens, np.int32),
        target_sources=np.zeros(0, np.int64),
        target_ids=np.zeros(0, np.int64),
        loss_mask=none,
        advantages=none,
        rollout_logprobs=none,
        reference_logprobs=None,
        proximal_logprobs=None,
        rollout_ids=np.zeros(0, np.int32),
    )


PROMPT = (5, 9, 33, 71)
ANSWERS = ((10, 11, 12, 2), (7, 2), (100, 101, 102, 103, 104, 105), (64, 2, 2))
ADVANTAGES = (1.0, -0.5, 0.3, -0.8)


def answers_after(model, prompt: Sequence[int], answers: Sequence[Sequence[int]]):  # noqa: ANN001, ANN201
    """Log-probs of every answer's tokens by an HF model, one after another, float32 with gradient."""
    import torch

    parts = []
    for answer in answers:
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0].float().log_softmax(-1)
        parts.append(logits[len(prompt) - 1 : -1].gather(1, torch.tensor(answer)[:, None])[:, 0])
    return torch.cat(parts)
