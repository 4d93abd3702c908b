"""The `megatron:` section against the real fields of megatron-core's TransformerConfig.

The fields are read from the source of the installed package, so that no torch is imported.
"""

import ast
import importlib.util
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from grpo_megatron.config.field_types import allowed_types, fields_in, fits
from grpo_megatron.config.problems import shown

_SOURCES = ("core/model_parallel_config.py", "core/transformer/transformer_config.py")
_CLASSES = ("ModelParallelConfig", "TransformerConfig")

_FROM_THE_MODEL = "it is read from config.json in model.policy; remove the line"
_BY_THE_PROGRAM = "the program sets it to what its phases need; remove the line"

OWNED_FIELDS: Mapping[str, str] = {
    "tensor_model_parallel_size": "set parallel.tensor",
    "pipeline_model_parallel_size": "set parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "set parallel.virtual_pipeline",
    "context_parallel_size": "set parallel.context",
    "expert_model_parallel_size": "set parallel.expert",
    "sequence_parallel": "set parallel.sequence_parallel",
    "bf16": "set model.dtype",
    "fp16": "set model.dtype",
    "params_dtype": "set model.dtype",
    "pipeline_dtype": "set model.dtype",
    "autocast_dtype": "set model.dtype",
    "enable_autocast": "set model.dtype",
    "deterministic_mode": "set run.deterministic",
    "inference_sampling_seed": "set run.seed",
    "mtp_num_layers": "set modules.rollout.mtp_enabled",
    "recompute_granularity": "set modules.training.recompute_activations",
    "recompute_method": "set modules.training.recompute_activations",
    "recompute_num_layers": "set modules.training.recompute_activations",
    "calculate_per_token_loss": "set modules.training.loss_mean",
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "normalization",
            "layernorm_epsilon",
            "add_bias_linear",
            "add_qkv_bias",
            "gated_linear_unit",
            "activation_func",
            "qk_layernorm",
            "rotary_interleaved",
            "multi_latent_attention",
            "num_moe_experts",
            "moe_ffn_hidden_size",
        ),
        _FROM_THE_MODEL,
    ),
    **dict.fromkeys(
        (
            "timers",
            "finalize_model_grads_func",
            "grad_scale_func",
            "no_sync_func",
            "grad_sync_func",
            "param_sync_func",
            "variable_seq_lengths",
            "use_cpu_initialization",
            "perform_initialization",
            "init_method",
            "output_layer_init_method",
            "embedding_init_method",
            "init_model_with_meta_device",
            "deallocate_pipeline_outputs",
            "hidden_dropout",
            "attention_dropout",
            "transformer_impl",
            "attention_backend",
            "overlap_p2p_comm",
            "batch_p2p_comm",
        ),
        _BY_THE_PROGRAM,
    ),
}
"""Fields that another key or the program decides, and what to do instead."""


@lru_cache(maxsize=1)
def read_megatron_fields() -> Mapping[str, ast.expr] | None:
    """Field name -> annotation, or None when megatron-core is not installed."""
    specification = importlib.util.find_spec("megatron")
    folders = list(specification.submodule_search_locations or ()) if specification else []
    for folder in map(Path, folders):
        sources = [folder / source for source in _SOURCES]
        if all(source.is_file() for source in sources):
            declared = [field for source in sources for _, field in fields_in(source, _CLASSES)]
            return {ast.unparse(field.target): field.annotation for field in declared}
    return None


def check_megatron_section(section: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, message and fix for every key that cannot be passed on."""
    if not section:
        return []
    fields = read_megatron_fields()
    if fields is None:
        fix = "pip install megatron-core, or remove the section"
        return [("", "megatron-core is not installed, so the names here cannot be checked", fix)]
    return [(name, *trouble) for name, value in section.items() if (trouble := _check_field(name, value, fields))]


def _check_field(name: str, value: Any, fields: Mapping[str, ast.expr]) -> tuple[str, str] | None:
    if name in OWNED_FIELDS:
        return "this field of megatron-core is not passed through", OWNED_FIELDS[name]
    if name not in fields or name.startswith("_"):
        close = get_close_matches(name, [*fields, *OWNED_FIELDS], n=1)
        fix = f"did you mean {close[0]}?" if close else ""
        return "megatron-core's TransformerConfig has no such field", fix
    allowed = list(allowed_types(fields[name]))
    if not any(fits(value, kind) for kind in allowed):
        return f"expected {' or '.join(allowed)}, got {shown(value)}", ""
    return None
