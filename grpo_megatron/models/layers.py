"""Which modules a layer is made of: megatron-core's own specs, local or Transformer Engine."""

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_megatron.platform.attention import BlockAttention


class PolicyNorm(torch.nn.RMSNorm):
    """RMSNorm that tells the optimizer that its gradient is partial under sequence parallelism.

    megatron-core's wrapper of the torch norm refuses sequence parallelism only because it lacks this mark.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def layer_spec(
    config: TransformerConfig, *, transformer_engine: bool, stage: int
) -> ModuleSpec | TransformerBlockSubmodules:
    """What `GPTModel` is built from on this pipeline stage."""
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    spec.submodules.input_layernorm = PolicyNorm
    spec.submodules.pre_mlp_layernorm = PolicyNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = BlockAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = PolicyNorm
    num_layers = get_num_layers_to_build(config, pp_rank=stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=PolicyNorm)
