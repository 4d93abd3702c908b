"""From a family's description to megatron-core modules on this rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    model_parallel_cuda_manual_seed,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_megatron.families.base import ModelDescription
from grpo_megatron.families.rotary import inverse_frequencies
from grpo_megatron.models.head import HeadDtype, OutputHead
from grpo_megatron.models.layers import layer_spec
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.platform.device import Platform
from grpo_megatron.platform.kernels import Kernels

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class BuildSettings:
    """What a model needs to know besides its description."""

    dtype: Literal["bfloat16", "float32"]
    head_dtype: HeadDtype
    sequence_parallel: bool = False
    recompute_activations: bool = False
    max_sequence_tokens: int = 4096
    megatron: Mapping[str, Any] | None = None
    """The user's `megatron:` section."""


def transformer_config(
    description: ModelDescription, settings: BuildSettings, groups: Groups, platform: Platform, kernels: Kernels
) -> TransformerConfig:
    """megatron-core's configuration; a key of the user's `megatron:` section wins over a default of ours."""
    dtype = DTYPES[settings.dtype]
    fused = kernels.transformer_engine
    fields: dict[str, Any] = {
        "num_layers": description.num_layers,
        "hidden_size": description.hidden_size,
        "ffn_hidden_size": description.ffn_hidden_size,
        "num_attention_heads": description.num_attention_heads,
        "num_query_groups": description.num_key_value_heads,
        "kv_channels": description.head_size,
        "layernorm_epsilon": description.norm_epsilon,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": description.attention_bias,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": groups.grid.tensor,
        "pipeline_model_parallel_size": groups.grid.pipeline,
        "context_parallel_size": groups.grid.context,
        "sequence_parallel": settings.sequence_parallel,
        # Weights are always loaded, and the loader refuses to leave one out.
        "perform_initialization": False,
        "use_cpu_initialization": platform.kind == "cpu",
        # Packed rows differ in length, so stages tell each other the shape.
        "variable_seq_lengths": groups.grid.pipeline > 1,
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_comm": False,
        # With gloo the buffer may be freed while it is still being sent.
        "deallocate_pipeline_outputs": platform.kind == "cuda",
        # Sums, not means: the loss divides by global token counts itself.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": fused,
        "apply_rope_fusion": False,
        "persist_layer_norm": fused,
        "attention_backend": AttnBackend.auto if fused else AttnBackend.local,
    }
    if settings.recompute_activations:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**(fields | dict(settings.megatron or {})))


def build_policy(
    description: ModelDescription, settings: BuildSettings, groups: Groups, platform: Platform, kernels: Kernels
) -> list[GPTModel]:
    """This rank's model chunks (one without virtual pipelining), with memory for parameters but no values yet."""
    model_parallel_cuda_manual_seed(0)  # the modules look the tracker up; there is no dropout to seed
    config = transformer_config(description, settings, groups, platform, kernels)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, transformer_engine=kernels.transformer_engine, stage=groups.stage),
        vocab_size=description.padded_vocab_size(groups.grid.tensor),
        max_sequence_length=settings.max_sequence_tokens,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        parallel_output=True,
        share_embeddings_and_output_weights=description.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=description.rope_theta,
    )
    frequencies = torch.tensor(inverse_frequencies(description), dtype=torch.float32)
    model.rotary_pos_emb.inv_freq = frequencies.to(platform.device)
    if groups.is_last_stage:
        OutputHead.adopt(model.output_layer, head_dtype=settings.head_dtype, vocab_size=description.vocab_size)
    _mark_sharded_parameters(model)
    return [model.to(device=platform.device, dtype=DTYPES[settings.dtype])]


def _mark_sharded_parameters(model: GPTModel) -> None:
    """megatron-core marks a sharded parameter while it initialises it, which is left out here.

    Without the mark the gradient norm counts the shard of the first tensor-parallel rank only.
    """
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | VocabParallelEmbedding):
            axis = 0
        elif isinstance(module, RowParallelLinear):
            axis = 1
        else:
            continue
        sharded = [module.weight] + ([module.bias] if axis == 0 and getattr(module, "bias", None) is not None else [])
        for parameter in sharded:
            if parameter is not None and not getattr(parameter, "tensor_model_parallel", False):
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)
