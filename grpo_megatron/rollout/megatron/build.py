"""Builds the embedded engine from the trainer's modules, and refuses what it cannot do."""

from collections.abc import Callable, Sequence

from megatron.core.models.gpt import GPTModel

from grpo_megatron.config.schema import RolloutSection
from grpo_megatron.families.base import ModelDescription
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.platform import paged_attention
from grpo_megatron.platform.device import Platform
from grpo_megatron.platform.kernels import choose_kernels
from grpo_megatron.rollout.base import EngineCapabilities, EnginePlace
from grpo_megatron.rollout.megatron.admission import Admission, Limits
from grpo_megatron.rollout.megatron.cache import CacheShape, KeyValueCache
from grpo_megatron.rollout.megatron.context import StepContext
from grpo_megatron.rollout.megatron.engine import MegatronEngine
from grpo_megatron.rollout.megatron.forward import StageForward
from grpo_megatron.rollout.megatron.lockstep import Lockstep

TORCH_BLOCK_TOKENS = 32
"""Small: a gathered block is read whole, and an answer wastes half a block on average."""
FLASH_BLOCK_TOKENS = 256
"""flash-attn's paged kernels want a multiple of 256."""
PROMPT_TOKENS_PER_STEP = 2048
"""Bounds the activations of a step that computes prompts."""

_REFUSALS = {
    "modules.rollout.mtp_enabled": "megatron-core 0.16 has no speculative decoding; set modules.rollout.mtp_enabled: "
    "false or another modules.rollout.engine"
}


def build_megatron_engine(
    chunks: Sequence[GPTModel],
    description: ModelDescription,
    settings: RolloutSection,
    groups: Groups,
    platform: Platform,
    tokenizer_decode: Callable[[Sequence[int]], str],
    max_sequence_tokens: int,
    *,
    cache_tokens: int | None = None,
) -> MegatronEngine:
    """The engine of this model-parallel group.

    Args:
        max_sequence_tokens: longest prompt and answer together.
        cache_tokens: size of the key-value cache; default: `max_concurrent_rollouts` of the longest sequences. On a
            CPU memory is only taken as it is written.
    """
    _refuse(chunks, settings, groups)
    model = chunks[0]
    uses_flash = choose_kernels().flash_attention
    if not uses_flash:
        paged_attention.install()
    if cache_tokens is None:
        longest = max_sequence_tokens + -max_sequence_tokens % _block_tokens(uses_flash)
        cache_tokens = settings.max_concurrent_rollouts * longest
    shape = _cache_shape(model, cache_tokens, uses_flash)
    cache = KeyValueCache(shape, platform.device)
    context = StepContext(
        cache,
        max_sequence_tokens=max_sequence_tokens,
        token_multiple=groups.grid.tensor if model.config.sequence_parallel else 1,
        device=platform.device,
    )
    limits = Limits(
        max_rows=settings.max_concurrent_rollouts,
        max_sequence_tokens=max_sequence_tokens,
        block_tokens=shape.block_tokens,
        num_blocks=shape.num_blocks,
        prompt_tokens_per_step=PROMPT_TOKENS_PER_STEP,
        share_prompt_prefix=settings.share_prompt_prefix,
    )
    return MegatronEngine(
        model=model,
        forward=StageForward(model, context, groups),
        cache=cache,
        admission=Admission(limits),
        lockstep=Lockstep(groups),
        place=engine_place(groups),
        vocab_size=description.vocab_size,
        decode=tokenizer_decode,
        capabilities=EngineCapabilities(shares_training_modules=True, refusals=_REFUSALS),
    )


def engine_place(groups: Groups) -> EnginePlace:
    """One engine per replica: every model-parallel group runs on its own modules."""
    return EnginePlace(groups.replica, groups.num_replicas, groups.is_model_leader)


def _block_tokens(uses_flash: bool) -> int:
    return FLASH_BLOCK_TOKENS if uses_flash else TORCH_BLOCK_TOKENS


def _cache_shape(model: GPTModel, cache_tokens: int, uses_flash: bool) -> CacheShape:
    """This rank's layers and heads; the number of blocks is the same on all ranks."""
    attention = model.decoder.layers[0].self_attention
    return CacheShape(
        num_layers=len(model.decoder.layers),
        num_heads=attention.num_query_groups_per_partition,
        channels=attention.hidden_size_per_attention_head,
        num_blocks=cache_tokens // _block_tokens(uses_flash),
        block_tokens=_block_tokens(uses_flash),
        dtype=model.config.params_dtype,
        layout="token_major" if uses_flash else "head_major",
    )


def _refuse(chunks: Sequence[GPTModel], settings: RolloutSection, groups: Groups) -> None:
    """What the embedded engine cannot do, with the key to change."""
    if len(chunks) != 1:
        raise ValueError(
            f"parallel.virtual_pipeline: {len(chunks)}: the embedded engine runs one chunk per rank, as all inference "
            "of megatron-core; set it to 1 or another modules.rollout.engine"
        )
    if groups.grid.context > 1:
        raise ValueError(
            f"parallel.context: {groups.grid.context}: the embedded engine does not split sequences; set it to 1 or "
            "another modules.rollout.engine"
        )
    if settings.mtp_enabled:
        raise ValueError(f"modules.rollout.mtp_enabled: {_REFUSALS['modules.rollout.mtp_enabled']}")
    if settings.tensor not in (None, groups.grid.tensor):
        raise ValueError(
            f"modules.rollout.tensor: {settings.tensor}: the embedded engine runs on the trainer's shards and has its "
            f"parallel.tensor {groups.grid.tensor}; remove the key"
        )
