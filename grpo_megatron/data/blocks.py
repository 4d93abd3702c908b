"""Blocks of tokens that attend to one another, and how they are laid out in a row (`batch.MicroBatch`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from grpo_megatron.batch import MicroBatch, Prompt, ScoredRollout


@dataclass(frozen=True)
class TrainedAnswer:
    """A rollout that is trained, with its place among the step's rollouts."""

    rollout_id: int
    scored: ScoredRollout
    advantage: float

    @property
    def num_tokens(self) -> int:
        return self.scored.rollout.num_tokens

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.scored.rollout.loss_mask)


@dataclass(frozen=True)
class Block:
    """One prompt followed by answers to it, in the order of their index.

    Example: a prompt of 2 tokens with answers of 2 and 1 tokens has 5 tokens.
    """

    prompt: Prompt
    answers: tuple[TrainedAnswer, ...]

    @cached_property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids) + sum(answer.num_tokens for answer in self.answers)

    @property
    def sort_key(self) -> tuple[int, str, int]:
        """Longest first; the rest makes every order unique, whatever order the rollouts came in."""
        return (-self.num_tokens, self.prompt.id, self.answers[0].scored.rollout.index)


def lay_out(blocks: Sequence[Block], *, pad_to_multiple: int, pad_token_id: int) -> MicroBatch:
    """Put blocks into one row, padded at its end. Without blocks the row is `pad_to_multiple` padding tokens."""
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    targets: list[_Targets] = []
    block_lengths: list[int] = []
    start = 0
    for block in blocks:
        prompt = np.asarray(block.prompt.token_ids, np.int64)
        tokens.append(prompt)
        positions.append(np.arange(len(prompt)))
        segments.append(np.zeros(len(prompt), np.int32))
        last_of_prompt = start + len(prompt) - 1
        end = last_of_prompt + 1
        for segment, answer in enumerate(block.answers, start=1):
            length = answer.num_tokens
            tokens.append(np.asarray(answer.scored.rollout.token_ids, np.int64))
            positions.append(np.arange(len(prompt), len(prompt) + length))
            segments.append(np.full(length, segment, np.int32))
            targets.append(_answer_targets(answer, first_source=last_of_prompt, start=end))
            end += length
        block_lengths.append(end - start)
        start = end
    num_padding = -start % pad_to_multiple if blocks else pad_to_multiple
    if num_padding:
        tokens.append(np.full(num_padding, pad_token_id, np.int64))
        positions.append(np.arange(num_padding))
        segments.append(np.zeros(num_padding, np.int32))
        block_lengths.append(num_padding)
    return MicroBatch(
        token_ids=_join(tokens, np.int64),
        position_ids=_join(positions, np.int64),
        block_ids=np.repeat(np.arange(len(block_lengths), dtype=np.int32), block_lengths),
        segment_ids=_join(segments, np.int32),
        target_sources=_join([each.sources for each in targets], np.int64),
        target_ids=_join([each.token_ids for each in targets], np.int64),
        loss_mask=np.ones(sum(len(each.token_ids) for each in targets), np.float32),
        advantages=_join([each.advantages for each in targets], np.float32),
        rollout_logprobs=_join([each.rollout_logprobs for each in targets], np.float32),
        reference_logprobs=_join_if_all([each.reference_logprobs for each in targets]),
        proximal_logprobs=None,
        rollout_ids=_join([each.rollout_ids for each in targets], np.int32),
    )


@dataclass(frozen=True)
class _Targets:
    """The trained tokens of one answer."""

    sources: np.ndarray  # int64 [targets]
    token_ids: np.ndarray  # int64 [targets]
    advantages: np.ndarray  # float32 [targets]
    rollout_logprobs: np.ndarray  # float32 [targets]
    reference_logprobs: np.ndarray | None  # float32 [targets]
    rollout_ids: np.ndarray  # int32 [targets]


def _answer_targets(answer: TrainedAnswer, *, first_source: int, start: int) -> _Targets:
    rollout = answer.scored.rollout
    sources = np.arange(start - 1, start - 1 + rollout.num_tokens)
    if rollout.num_tokens:
        sources[0] = first_source  # the first token is predicted by the prompt's last one, not by the answer before
    trained = np.asarray(rollout.loss_mask, bool)
    count = int(trained.sum())
    reference = answer.scored.reference_logprobs
    name = f"rollout {rollout.prompt_id}[{rollout.index}]"
    assert reference is None or len(reference) == rollout.num_tokens, f"{name}: reference log-probs of another length"
    return _Targets(
        sources=sources[trained],
        token_ids=np.asarray(rollout.token_ids, np.int64)[trained],
        advantages=np.full(count, answer.advantage, np.float32),
        rollout_logprobs=np.asarray(rollout.logprobs, np.float32)[trained],
        reference_logprobs=None if reference is None else np.asarray(reference, np.float32)[trained],
        rollout_ids=np.full(count, answer.rollout_id, np.int32),
    )


def _join(parts: Sequence[np.ndarray], kind: type[np.generic]) -> np.ndarray:
    return np.concatenate(parts).astype(kind, copy=False) if parts else np.zeros(0, kind)


def _join_if_all(parts: Sequence[np.ndarray | None]) -> np.ndarray | None:
    present = [part for part in parts if part is not None]
    assert len(present) in (0, len(parts)), "some rollouts of the step have reference log-probs and some have not"
    return _join(present, np.float32) if present else None
