"""What every rollout engine promises, embedded or in a process of its own."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from grpo_megatron.batch import Prompt, Rollout

EnginePart = Literal["weights", "kv_cache"]
NO_VERSION = -1
"""Served by an engine of another process while it has no whole version of the policy."""


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are drawn. Log-probs are those of the distribution at this temperature."""

    max_new_tokens: int
    temperature: float = 1.0
    """0.0 is greedy: allowed for evaluation, refused for training rollouts."""
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class RolloutRequest:
    """One ticket: `num_rollouts` answers to one prompt.

    The member with index i draws from a stream keyed by (seed, prompt id, i, token position), so a draw
    does not depend on what else is in the batch.
    """

    id: str
    prompt: Prompt
    num_rollouts: int
    sampling: SamplingSettings
    seed: int
    indices: tuple[int, ...] = ()
    """Which members of the group are wanted, if not all: what an engine that died left open."""

    @property
    def members(self) -> tuple[int, ...]:
        return self.indices or tuple(range(self.num_rollouts))


@dataclass(frozen=True)
class EnginePlace:
    """Which of the run's engines this rank belongs to.

    Example: four ranks, engines of two: ranks 2 and 3 belong to engine 1 and rank 2 leads it.
        >>> EnginePlace(index=1, num_engines=2, is_leader=True).index
        1
    """

    index: int
    num_engines: int
    is_leader: bool
    """This rank hands out the engine's tickets and gets its rollouts."""


class EngineRestarted(RuntimeError):
    """The engine was lost while it generated, and runs again without weights: publish, then ask for `unfinished`."""

    def __init__(self, reason: str, unfinished: "Sequence[RolloutRequest]") -> None:
        super().__init__(reason)
        self.unfinished = tuple(unfinished)


@dataclass(frozen=True)
class EngineCapabilities:
    """What the engine can do on this machine, probed and not assumed."""

    shares_training_modules: bool
    """True: publish has nothing to copy, the engine runs on the trainer's own parameters."""
    frees_memory: bool = True
    """Parts that sleep give their memory back, on this machine."""
    tied_embeddings: bool = True
    exact_speculation: bool = False
    """Sampled output under MTP speculation is the model's own distribution."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Configuration key -> reason and fix, for what this engine cannot do here."""


@dataclass(frozen=True)
class EngineHealth:
    ok: bool
    policy_version: int
    detail: str = ""


@dataclass(frozen=True)
class EngineStats:
    """Counters since the last call of `stats`."""

    num_prompt_tokens: int
    num_new_tokens: int
    busy_seconds: float
    num_steps: int


class RequestSource(Protocol):
    """Where an engine gets its tickets. Asked only on the leader of a model-parallel group."""

    def take(self, max_rollouts: int) -> Sequence[RolloutRequest] | None:
        """Return requests of at most `max_rollouts` answers in all, [] if none now, None if there are no more.

        A request that is larger comes alone: the engine starts as many of its answers as it has room for.
        """


class RolloutEngine(Protocol):
    """One engine per rollout model-parallel group. Every rank of the group calls every method."""

    capabilities: EngineCapabilities
    place: EnginePlace

    @property
    def needs_weights(self) -> bool:
        """The engine runs and has no version of the policy yet, at its start and after a restart."""

    def generate(self, requests: RequestSource) -> AsyncIterator[Rollout]:
        """Stream finished rollouts, in the order in which they end. Collective over the model-parallel group.

        With the embedded engine every rank of the group iterates; the leader admits, all step, and every
        rank yields the same rollouts. An engine in a process of its own yields on its leader only.

        Raises:
            EngineRestarted: on the leader; the engine was lost and is there again, without weights.
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Stop these requests; what they have so far is yielded with finish reason `abort`."""

    def sleep(self, parts: Sequence[EnginePart]) -> None: ...

    def wake(self, parts: Sequence[EnginePart]) -> None: ...

    def set_version(self, policy_version: int) -> None:
        """Stamp what is sampled from now on; called after a publish has been committed."""

    def health(self) -> EngineHealth: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...
