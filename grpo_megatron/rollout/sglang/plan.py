"""What the engines of a machine come to: how many, their threads, their memory. Imports no torch, starts nothing."""

from dataclasses import dataclass

from grpo_megatron.config.schema import Config
from grpo_megatron.families.base import ModelDescription
from grpo_megatron.families.counting import count_parameters

RESERVED_CACHE_TOKENS = 64
"""Beside those of the answers: the probe's, and what rounding to pages takes."""


@dataclass(frozen=True)
class EnginePlan:
    """One machine's engines.

    Example: two ranks, two cores, engines of one rank; 16 answers of at most 40 tokens.
        >>> plan_engines(config, model, tensor=1, ranks_per_machine=2, cores=2, ...)  # doctest: +SKIP
        EnginePlan(num_engines=2, tensor=1, threads=1, cache_tokens=704, weight_bytes=269030016, cache_bytes=16220160)
    """

    num_engines: int
    tensor: int
    threads: int
    """CPU threads of each tensor-parallel rank of an engine."""
    cache_tokens: int
    """Keys and values of so many tokens fit into one engine."""
    weight_bytes: int
    """On each device, as `cache_bytes`."""
    cache_bytes: int


def plan_engines(
    config: Config,
    model: ModelDescription,
    *,
    tensor: int,
    ranks_per_machine: int,
    cores: int,
    max_sequence_tokens: int,
) -> EnginePlan:
    """Plan for one machine.

    Args:
        tensor: tensor-parallel size of an engine.
        cores: of the machine.
        max_sequence_tokens: longest prompt and answer together.
    """
    rollout = config.modules.rollout
    cache_tokens = rollout.max_concurrent_rollouts * max_sequence_tokens + RESERVED_CACHE_TOKENS
    item_bytes = 2 if config.model.dtype == "bfloat16" else 4
    heads = max(1, model.num_key_value_heads // tensor)
    token_bytes = 2 * model.num_layers * heads * model.head_size * item_bytes
    num_engines = max(1, ranks_per_machine // tensor)
    return EnginePlan(
        num_engines=num_engines,
        tensor=tensor,
        # All tensor-parallel ranks share the cores: the trainer's ranks wait meanwhile.
        threads=rollout.engine_threads or max(1, cores // (num_engines * tensor)),
        cache_tokens=cache_tokens,
        weight_bytes=count_parameters(model) * item_bytes // tensor,
        cache_bytes=cache_tokens * token_bytes,
    )
