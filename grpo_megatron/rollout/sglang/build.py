"""Builds this rank's part of an SGLang engine: the server on the leader of its group, nothing on the others."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_megatron.config.schema import Config
from grpo_megatron.families.base import ModelDescription
from grpo_megatron.platform.device import Platform
from grpo_megatron.rollout.sglang.arguments import server_arguments
from grpo_megatron.rollout.sglang.engine import EngineLimits, EngineMemory, SglangEngine
from grpo_megatron.rollout.sglang.life import EngineLife
from grpo_megatron.rollout.sglang.plan import EngineGroup, plan_engines
from grpo_megatron.rollout.sglang.process import EngineProcess, EngineSettings


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
) -> SglangEngine:
    """Start the server and wait until it generates. To be called in the main thread.

    Args:
        max_sequence_tokens: longest prompt and answer together.
        logs: folder of `engine-N.log`.

    Raises:
        EngineFailure: it did not start; with the end of its log.
    """
    rollout, place = config.modules.rollout, group.place
    limits = EngineLimits(
        max_concurrent_rollouts=rollout.max_concurrent_rollouts,
        max_sequence_tokens=max_sequence_tokens,
        vocab_size=description.vocab_size,
        stall_seconds=rollout.engine_stall_seconds,
    )
    on_cpu = platform.kind == "cpu"
    plan = plan_engines(
        config,
        description,
        tensor=group.tensor,
        ranks_per_machine=group.local_world_size,
        cores=len(os.sched_getaffinity(0)),
        max_sequence_tokens=max_sequence_tokens,
    )
    memory = EngineMemory(plan.weight_bytes, plan.cache_bytes, frees_memory=not on_cpu)
    if not place.is_leader:
        return SglangEngine(None, place, limits, memory, decode=decode)

    def start(num_starts: int) -> EngineProcess:
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
            deadline_seconds=config.run.start_deadline_seconds,
            answer_seconds=rollout.engine_stall_seconds,
            **({} if rollout.python is None else {"python": Path(rollout.python)}),
        )
        return EngineProcess(settings)

    life = EngineLife(start, max_restarts=rollout.max_engine_restarts, say=say)
    life.wait_until_ready()
    return SglangEngine(life, place, limits, memory, decode=decode)
