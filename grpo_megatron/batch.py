"""The records that flow between the phases of a step: prompts, rollouts, scores, packed batches.

Numpy and plain Python only, so that rewards, data and the configuration tools never need torch;
`models/forward.py` puts a packed micro-batch on the device. Token ids are the truth: text is decoded for
rewards and readers, and never tokenised again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class RewardSpec:
    """What a scorer needs to know about one prompt.

    Example:
        >>> RewardSpec(name="math", answer="12").name
        'math'
    """

    name: str
    """Name of the scorer as configured in `modules.rewards`."""
    answer: Any = None
    """Gold answer; its type is the scorer's business."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Every other field of the prompt's line, as it is."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised once.

    Example:
        >>> prompt = Prompt("add-3-5", (1, 42, 7), "3 + 5 =", RewardSpec("exact", "8"), "arithmetic")
        >>> len(prompt.token_ids)
        3
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    """The prompt as the model sees it, chat template included."""
    reward: RewardSpec
    source: str = "default"
    """Which data set it came from; rewards are logged per source."""


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, end) of a rollout were sampled by this version of the policy."""

    start: int
    end: int
    version: int


@dataclass(frozen=True)
class Rollout:
    """One finished answer of the policy.

    Example:
        >>> rollout = Rollout("add-3-5", 0, (8, 2), (-0.1, -0.2), "stop", (VersionSpan(0, 2, 4),), "8")
        >>> rollout.num_tokens, rollout.loss_mask
        (2, (True, True))
    """

    prompt_id: str
    index: int
    """Position in its group, 0 <= index < group_size."""
    token_ids: tuple[int, ...]
    """The answer only, with the stop token that ended it, without the prompt."""
    logprobs: tuple[float, ...]
    """The engine's log-probability of every answer token, at the sampling temperature."""
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    text: str = ""
    """The answer decoded without special tokens, for rewards and readers."""
    loss_mask: tuple[bool, ...] = ()
    """False where a token came from a tool or the environment and is not trained; empty: all True."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.loss_mask:
            object.__setattr__(self, "loss_mask", (True,) * len(self.token_ids))
        lengths = (len(self.token_ids), len(self.logprobs), len(self.loss_mask))
        assert len(set(lengths)) == 1, f"rollout {self.prompt_id}[{self.index}]: lengths differ {lengths}"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class RewardResult:
    """What a scorer said about one rollout.

    A failure has `error` set and `score` None until the configured policy (`zero`, `drop`, `fail`)
    decides; 0.0 is a value and not "missing"; NaN is refused.

    Example:
        >>> RewardResult(1.0, {"correct": 1.0}).score
        1.0
    """

    score: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    """None, or the kind of failure in one word and a message: `timeout: no answer within 10 s`."""


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with everything the update needs to know about it. Unscored members have no advantage."""

    prompt: Prompt
    rollout: Rollout
    reward: RewardResult
    reference_logprobs: np.ndarray | None = None  # float32 [answer tokens]


@dataclass(frozen=True)
class MicroBatch:
    """Rollouts packed into one row, with one target per trained answer token.

    The row is a run of blocks; tokens attend inside their block only. A block is one prompt followed by
    one answer, or by several answers that share the prompt: then each answer is a segment of its own,
    attends to the prompt (segment 0) and to itself, and its positions go on from the prompt's end. The
    log-prob of a target is read at `target_sources`, the row index of the token before it, so logits are
    computed where they are needed and nowhere else.

    Example: prompt (5, 6) with answers (7, 2) and (8,), prefix shared:

        token_ids            5  6  7  2  8
        position_ids         0  1  2  3  2
        block_ids            0  0  0  0  0
        segment_ids          0  0  1  1  2
        target_sources       1  2  1            target_ids  7  2  8
    """

    token_ids: np.ndarray  # int64 [tokens]
    position_ids: np.ndarray  # int64 [tokens]
    block_ids: np.ndarray  # int32 [tokens], ascending from 0; padding at the end is a block of its own
    segment_ids: np.ndarray  # int32 [tokens], 0 = prompt, k = k-th answer of the block
    target_sources: np.ndarray  # int64 [targets], row index whose logits predict the target
    target_ids: np.ndarray  # int64 [targets]
    loss_mask: np.ndarray  # float32 [targets], 1 where the token is trained
    advantages: np.ndarray  # float32 [targets]
    rollout_logprobs: np.ndarray  # float32 [targets], the engine's
    reference_logprobs: np.ndarray | None  # float32 [targets]
    proximal_logprobs: np.ndarray | None  # float32 [targets]; None: the ratio is taken at the policy itself
    rollout_ids: np.ndarray  # int32 [targets], index into the step's sorted rollouts

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_targets(self) -> int:
        return int(self.target_ids.shape[0])


@dataclass(frozen=True)
class MiniBatch:
    """This data-parallel rank's share of one optimizer step; every rank has equally many micro-batches."""

    micro_batches: tuple[MicroBatch, ...]
    num_loss_tokens: int
    """Trained tokens over all data-parallel ranks: the denominator of token means."""
    num_loss_rollouts: int
    """Trained rollouts over all data-parallel ranks: the denominator of sequence means."""


@dataclass(frozen=True)
class TrainBatch:
    """All mini-batches of one step, and what was left out on the way there."""

    mini_batches: tuple[MiniBatch, ...]
    num_rollouts: int
    num_dropped: Mapping[str, int] = field(default_factory=dict)
    """Rollouts that are not trained, counted by reason: `no_signal`, `reward_error`, `truncated`."""
