"""The `sglang:` section against the arguments of the installed SGLang's server.

What another key of ours or the program decides is refused with what to do instead, and so is what would have no effect
here, or would make the engine's answers another model's than the one that is trained.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from grpo_megatron.config.field_types import allowed_types, fits
from grpo_megatron.config.problems import shown
from grpo_megatron.config.sglang_package import SglangField, find_sglang, read_sglang_fields

_BY_THE_PROGRAM = "the program sets it; remove the line"
_FROM_THE_MODEL = "it is read from the folder in model.policy; remove the line"
_PUBLISHED = "the engine's weights are those that are published from the trainer; remove the line"
_ON_ITS_OWN = "an engine generates whole answers on one machine, as one tensor-parallel group; remove the line"
_DRAFTS = "set modules.rollout.mtp_enabled"
_TOKEN_IDS = "token ids go in and come out, with settings of their own; remove the line"
_WHOLE_DISTRIBUTION = "the trainer recomputes the log-probs of the model's own distribution; remove the line"
_OLD_CACHE = "keys and values kept outside the engine's own cache would outlive a publish; remove the line"
_NOT_ASKED = "nothing asks the engine for it; remove the line"
_LENGTHS = "set data.max_prompt_tokens and modules.rollout.max_new_tokens"
_CACHE_TOKENS = (
    "the tokens of the cache follow from modules.rollout.max_concurrent_rollouts, modules.rollout.max_new_tokens and "
    "data.max_prompt_tokens: set these"
)

OWNED_GROUPS: Mapping[str, str] = {
    "Serving": _TOKEN_IDS,
    "Spec": _DRAFTS,
    "Disagg": _ON_ITS_OWN,
    "Lora": _PUBLISHED,
    "Mm": "the models here are text models; remove the line",
    "ExecDllm": "answers are generated token by token; remove the line",
    "ExecOffload": "set memory_management.dynamic_offload",
}
"""Whole groups of SGLang's fields that are not passed through."""

OWNED_FIELDS: Mapping[str, str] = {
    "model_path": "set model.policy",
    "tokenizer_path": "set model.policy",
    "dtype": "set model.dtype",
    "enable_fp32_lm_head": "set model.output_head_dtype",
    "tp_size": "set modules.rollout.tensor",
    "dp_size": "there is one engine for every modules.rollout.tensor ranks: set that one",
    "random_seed": "set run.seed",
    "max_running_requests": "set modules.rollout.max_concurrent_rollouts",
    "max_queued_requests": "set modules.rollout.max_concurrent_rollouts",
    "context_length": _LENGTHS,
    "allow_auto_truncate": _LENGTHS,
    "max_total_tokens": _CACHE_TOKENS,
    "mem_fraction_static": _CACHE_TOKENS,
    "disable_radix_cache": "set modules.rollout.share_prompt_prefix",
    "preferred_sampling_params": "set modules.rollout.temperature, top_p, top_k and stop_token_ids",
    "sampling_defaults": "set modules.rollout.temperature, top_p, top_k and stop_token_ids",
    "skip_server_warmup": _BY_THE_PROGRAM,
    **dict.fromkeys(
        ("enable_memory_saver", "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup"),
        "set memory_management.dynamic_offload",
    ),
    **dict.fromkeys(
        (
            "host",
            "port",
            "api_key",
            "admin_api_key",
            "weight_version",
            "skip_tokenizer_init",
            "stream_interval",
            "incremental_streaming_output",
            "batch_notify_size",
            "warmups",
            "ssl_keyfile",
            "ssl_certfile",
            "ssl_ca_certs",
            "ssl_keyfile_password",
            "enable_ssl_refresh",
            "enable_http2",
            "http2_max_concurrent_streams",
            "http2_initial_connection_window_size",
            "fastapi_root_path",
            "enable_http_worker_reuseport",
            "grpc_mode",
            "smg_grpc_mode",
            "grpc_port",
            "sidecar",
            "sidecar_args",
            "smg_http_sidecar_port",
            "device",
            "base_gpu_id",
            "gpu_id_step",
            "use_ray",
            "custom_sigquit_handler",
            "nccl_port",
            "gated_launch_port",
            "engine_info_bootstrap_port",
        ),
        _BY_THE_PROGRAM,
    ),
    **dict.fromkeys(
        (
            "dist_init_addr",
            "nnodes",
            "node_rank",
            "pp_size",
            "pp_max_micro_batch_size",
            "pp_async_batch_depth",
            "dcp_size",
            "attn_dp_size",
            "attn_cp_size",
            "moe_dp_size",
            "dwdp_size",
            "enable_dp_attention",
            "enable_dp_lm_head",
            "enable_prefill_cp",
            "load_balance_method",
            "ep_join_mode",
            "ep_join_rank_offset",
            "elastic_ep_initial_size",
            "elastic_ep_backend",
            "max_ep_size",
        ),
        _ON_ITS_OWN,
    ),
    **dict.fromkeys(("revision", "download_dir", "model_checksum", "json_model_override_args"), _FROM_THE_MODEL),
    **dict.fromkeys(
        (
            "load_format",
            "model_loader_extra_config",
            "custom_weight_loader",
            "startup_weight_load_mode",
            "delete_ckpt_after_loading",
            "checkpoint_engine_wait_weights_before_ready",
            "modelexpress_config",
            "decrypted_config_file",
            "decrypted_draft_config_file",
            "quantization",
            "quantization_param_path",
            "modelopt_quant",
            "modelopt_checkpoint_restore_path",
            "modelopt_checkpoint_save_path",
            "modelopt_export_path",
            "quantize_and_serve",
            "rl_quant_profile",
            "enable_elastic_expert_backup",
            "enable_paged_experts",
        ),
        _PUBLISHED,
    ),
    **dict.fromkeys(
        ("is_embedding", "enable_mis", "enable_custom_logit_processor", "prefill_only_disable_kv_cache"),
        _WHOLE_DISTRIBUTION,
    ),
    **dict.fromkeys(
        (
            "hicache_storage_backend",
            "radix_cache_backend",
            "enable_unified_cache_external_linker",
            "enable_lmcache",
            "lmcache_config_file",
            "enable_flexkv",
            "flexkv_config_file",
        ),
        _OLD_CACHE,
    ),
    **dict.fromkeys(
        (
            "enable_return_hidden_states",
            "return_hidden_states_mode",
            "enable_return_aux_hidden_states",
            "aux_hidden_state_capture",
            "return_aux_hidden_state_layer_ids",
            "enable_return_routed_experts",
            "enable_return_indexer_topk",
        ),
        _NOT_ASKED,
    ),
}
"""Fields that another key or the program decides, and what to do instead."""

_OWNED_BEGINNINGS: Mapping[str, str] = {
    "speculative_": _DRAFTS,
    "disaggregation_": _ON_ITS_OWN,
    "lora_": _PUBLISHED,
    "weight_loader_": _PUBLISHED,
    "weight_cache_": _PUBLISHED,
    "remote_instance_weight_loader_": _PUBLISHED,
    "kt_": _PUBLISHED,
    "watermark_": _WHOLE_DISTRIBUTION,
    "enable_watermark": _WHOLE_DISTRIBUTION,
}

_WRITABLE = ("bool", "int", "float", "str", "list", "section", "Any")


def check_sglang_section(section: Mapping[str, Any], python: str | None) -> list[tuple[str, str, str]]:
    """Name, message and fix for every key that cannot be passed on to the SGLang of this interpreter.

    Where there is no SGLang nothing is said: the engine as a whole is refused then.

    Args:
        python: `modules.rollout.python`; None: the trainer's.
    """
    folder = find_sglang(python).folder if section else None
    if folder is None:
        return []
    fields = read_sglang_fields(folder)
    return [(name, *trouble) for name, value in section.items() if (trouble := _check_field(name, value, fields))]


def what_to_set_instead(name: str, group: str) -> str | None:
    """For a field that is ours; None for one that is passed through."""
    beginnings = (fix for beginning, fix in _OWNED_BEGINNINGS.items() if name.startswith(beginning))
    return OWNED_FIELDS.get(name) or next(beginnings, None) or OWNED_GROUPS.get(group)


def _check_field(name: str, value: Any, fields: Mapping[str, SglangField]) -> tuple[str, str] | None:
    meant = _find_name(name, fields)
    if meant is None:
        close = get_close_matches(name.replace("-", "_"), fields, n=1)
        return "SGLang's ServerArgs has no such field", f"did you mean {_described(close[0], fields)}?" if close else ""
    field = fields[meant]
    instead = what_to_set_instead(meant, field.group)
    if instead is not None:
        return "this field of SGLang is not passed through", instead
    if meant != name:
        return "SGLang's ServerArgs has no such field", f"write  {meant}: {_plain(value)}"
    allowed = list(allowed_types(field.annotation))
    if not any(fits(value, kind) for kind in allowed):
        return f"expected {' or '.join(allowed)}, got {shown(value)}", _fix_type(name, value, allowed)
    if field.choices is not None and value is not None and not isinstance(value, list) and value not in field.choices:
        close = get_close_matches(str(value), list(map(str, field.choices)), n=1)
        listed = ", ".join(map(str, field.choices))
        return f"{shown(value)} is not known; SGLang has: {listed}", f"did you mean {close[0]}?" if close else ""
    return None


def _find_name(name: str, fields: Mapping[str, SglangField]) -> str | None:
    """The field of this name, also when it is written as on SGLang's command line."""
    plain = name.lstrip("-").replace("-", "_")
    if plain in fields:
        return plain
    return next((field_name for field_name, field in fields.items() if plain in field.other_names), None)


def _described(name: str, fields: Mapping[str, SglangField]) -> str:
    instead = what_to_set_instead(name, fields[name].group)
    return name if instead is None else f"{name} (not passed through: {instead})"


def _fix_type(name: str, value: Any, allowed: list[str]) -> str:
    if isinstance(value, dict) and "str" in allowed:
        return f"write JSON in single quotes:  {name}: '{{...}}'"
    if "list" in allowed and not isinstance(value, dict):
        return f"write  {name}: [{_plain(value)}]"
    if not any(kind in _WRITABLE or kind.startswith(("'", *"0123456789")) for kind in allowed):
        return "a value of this type cannot be written in a file; remove the line"
    return ""


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
