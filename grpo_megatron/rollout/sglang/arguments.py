"""SGLang's arguments from our configuration."""

from typing import Any

from grpo_megatron.config.schema import Config
from grpo_megatron.rollout.base import NO_VERSION

RECEIVER = "grpo_megatron.rollout.sglang.receiver.load"
"""Import path, in the engine's process, of what puts published tensors into its model."""
STREAM_TOKENS = 16
"""An answer is streamed in pieces of this many tokens: often enough to see progress, seldom enough to cost nothing."""


def server_arguments(
    config: Config,
    *,
    model_path: str,
    on_cpu: bool,
    tensor: int,
    first_device: int,
    seed: int,
    cache_tokens: int,
) -> dict[str, Any]:
    """Fields of ServerArgs. What the section `sglang:` gives comes on top; it cannot name what is ours.

    Args:
        first_device: index of the first GPU of the engine's group on this machine.
        seed: unlike that of any other engine of the run.
        cache_tokens: size of the key-value cache, for all answers together.
    """
    rollout = config.modules.rollout
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "skip_tokenizer_init": True,  # token ids in and out
        "skip_server_warmup": True,  # we generate a token ourselves before the first use
        "dtype": config.model.dtype,
        "enable_fp32_lm_head": config.model.output_head_dtype == "float32",
        "tp_size": tensor,
        "random_seed": seed,
        "max_running_requests": rollout.max_concurrent_rollouts,
        "max_total_tokens": cache_tokens,
        "disable_radix_cache": not rollout.share_prompt_prefix,
        "schedule_policy": "lpm",  # answers to one prompt wait until its cache is there, and share it
        "sleep_on_idle": True,  # else an idle scheduler keeps a core busy while the trainer updates
        "stream_interval": STREAM_TOKENS,
        "incremental_streaming_output": True,
        "custom_weight_loader": [RECEIVER],
        "weight_version": str(NO_VERSION),  # nothing is served before the first publish
        "log_level": "info",
        "log_level_http": "warning",
    }
    arguments |= _for_cpu() if on_cpu else {"enable_memory_saver": True, "base_gpu_id": first_device}
    return arguments | config.sglang


def _for_cpu() -> dict[str, Any]:
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.5,  # a share of what is free at the start: max_total_tokens is the limit that counts
    }
