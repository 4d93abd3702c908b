"""Builds this rank's part of an SGLang engine: the server on the leader of its group, nothing on the others."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from grpo_megatron.config.schema import Config
from grpo_megatron.families.base import ModelDescription
from grpo_megatron.platform.device import Platform
from grpo_megatron.rollout.base import EnginePlace
from grpo_megatron.rollout.sglang.arguments import server_arguments
from grpo_megatron.rollout.sglang.engine import EngineLimits, EngineMemory, SglangEngine
from grpo_megatron.rollout.sglang.life import EngineLife
from grpo_megatron.rollout.sglang.plan import EnginePlan, plan_engines
from grpo_megatron.rollout.sglang.process import EngineProcess, EngineSettings


@dataclass(frozen=True)
class EngineGroup:
    """Ranks that share one engine: neighbours on one machine, as many as its tensor-parallel size.

    Example: rank 5 of 8 ranks on machines of four, engines of two.
        >>> EngineGroup(rank=5, local_rank=1, local_world_size=4, world_size=8, tensor=2).place
        EnginePlace(index=2, num_engines=4, is_leader=False)
    """

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int
    tensor: int

    @property
    def place(self) -> EnginePlace:
        return EnginePlace(self.rank // self.tensor, self.world_size // self.tensor, self.rank % self.tensor == 0)

    @property
    def ranks(self) -> tuple[int, ...]:
        first = self.rank - self.rank % self.tensor
        return tuple(range(first, first + self.tensor))


def build_sglang_engine(
    config: Config,
    group: EngineGroup,
    platform: Platform,
    description: ModelDescription,
    *,
    decode: Callable[[Sequence[int]], str],
    max_sequence_tokens: int,
    logs: Path,
    say: Callable[[str], None],
    warn: Callable[[str], None] | None = None,
) -> SglangEngine:
    """Start the server and wait until it generates. To be called in the main thread.

    Args:
        max_sequence_tokens: longest prompt and answer together.
        logs: folder of `engine-N.log`.
        say: told that the start takes its time.
        warn: told of every loss and restart; default: `say`.

    Raises:
        EngineFailure: it did not start; with the end of its log.
    """
    rollout, place = config.modules.rollout, group.place
    limits = EngineLimits(
        max_concurrent_rollouts=rollout.max_concurrent_rollouts,
        max_sequence_tokens=max_sequence_tokens,
        vocab_size=description.vocab_size,
        share_prompts=rollout.share_prompt_prefix,
        stall_seconds=rollout.engine_stall_seconds,
    )
    on_cpu = platform.kind == "cpu"
    plan = _plan(config, description, group, max_sequence_tokens)
    memory = EngineMemory(plan.weight_bytes, plan.cache_bytes, frees_memory=not on_cpu)
    if not place.is_leader:
        return SglangEngine(None, place, limits, memory, decode=decode)

    start = partial(_start, config, group, plan, on_cpu, logs)
    life = EngineLife(start, max_restarts=rollout.max_engine_restarts, say=say, warn=warn, frees_memory=not on_cpu)
    life.wait_until_ready()
    return SglangEngine(life, place, limits, memory, decode=decode)


def _start(
    config: Config, group: EngineGroup, plan: EnginePlan, on_cpu: bool, logs: Path, num_starts: int
) -> EngineProcess:
    """The process of this group's engine, after so many starts before."""
    rollout, place = config.modules.rollout, group.place
    arguments = server_arguments(
        config,
        model_path=config.model.policy or "",
        on_cpu=on_cpu,
        tensor=group.tensor,
        first_device=group.local_rank,
        # A restarted server must not repeat the draws of the one before.
        seed=config.run.seed + place.index + num_starts * place.num_engines,
        cache_tokens=plan.cache_tokens,
    )
    settings = EngineSettings(
        arguments,
        logs / f"engine-{place.index}.log",
        on_cpu=on_cpu,
        threads=plan.threads,
        cores=_cores(group, plan.threads),
        deadline_seconds=config.run.start_deadline_seconds,
        answer_seconds=rollout.engine_stall_seconds,
        **({} if rollout.python is None else {"python": Path(rollout.python)}),
    )
    return EngineProcess(settings)


def _cores(group: EngineGroup, threads: int) -> tuple[str, ...]:
    """Neighbouring cores for neighbouring ranks; with more ranks than cores they begin anew."""
    available = sorted(os.sched_getaffinity(0))
    first = (group.local_rank - group.local_rank % group.tensor) * threads
    return tuple(
        ",".join(str(available[(first + rank * threads + thread) % len(available)]) for thread in range(threads))
        for rank in range(group.tensor)
    )


def _plan(config: Config, description: ModelDescription, group: EngineGroup, max_sequence_tokens: int) -> EnginePlan:
    return plan_engines(
        config,
        description,
        tensor=group.tensor,
        ranks_per_machine=group.local_world_size,
        cores=len(os.sched_getaffinity(0)),  # the machine's: ranks are not bound to cores
        max_sequence_tokens=max_sequence_tokens,
    )
