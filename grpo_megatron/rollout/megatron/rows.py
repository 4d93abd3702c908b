"""The state of answers that are being generated, and the plan of one engine step."""

from dataclasses import dataclass, field

import numpy as np

from grpo_megatron.batch import FinishReason, VersionSpan
from grpo_megatron.rollout.base import RolloutRequest


@dataclass(eq=False)
class Row:
    """One answer under way."""

    request: RolloutRequest
    index: int
    """Position in its group."""
    uniforms: np.ndarray  # float64 [max_new_tokens]
    blocks: list[int] = field(default_factory=list)
    """Its blocks of the cache, in order of positions."""
    num_cached: int = 0
    """Tokens whose keys and values are in the cache."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt.token_ids

    @property
    def next_token(self) -> int:
        """The token that the next decode step computes."""
        return self.token_ids[-1] if self.token_ids else self.prompt[-1]

    @property
    def finish_reason(self) -> FinishReason | None:
        """`stop` wins where the stop token is also the last one allowed; None while it goes on."""
        if self.token_ids and self.token_ids[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.request.sampling.max_new_tokens else None

    def append(self, token_id: int, logprob: float, policy_version: int) -> None:
        position = len(self.token_ids)
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1].version == policy_version:
            self.versions[-1] = VersionSpan(self.versions[-1].start, position + 1, policy_version)
        else:
            self.versions.append(VersionSpan(position, position + 1, policy_version))


@dataclass(frozen=True)
class PromptPlan:
    """A prompt that this step computes, for members of its group that start together.

    The first row's blocks are written; the others share its full blocks and get a copy of the last one.
    """

    rows: tuple[Row, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.rows[0].prompt


@dataclass(frozen=True)
class BlockCopies:
    sources: tuple[int, ...] = ()
    destinations: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """What one forward pass computes: one token each for `decode`, then whole prompts."""

    decode: tuple[Row, ...]
    prompts: tuple[PromptPlan, ...]
    copies_before: BlockCopies = BlockCopies()
    """For rows that join a group whose prompt is in the cache already."""
    copies_after: BlockCopies = BlockCopies()

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_logit_rows(self) -> int:
        return len(self.decode) + len(self.prompts)

    @property
    def drawn_rows(self) -> list[tuple[Row, int]]:
        """Every row that gets a token from this step, with its row of the logits."""
        drawn = [(row, place) for place, row in enumerate(self.decode)]
        for place, prompt in enumerate(self.prompts, start=len(self.decode)):
            drawn += [(row, place) for row in prompt.rows]
        return drawn
