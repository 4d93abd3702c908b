"""Qwen2 and Qwen2.5 dense models: Llama's layers with biases on query, key and value."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from grpo_megatron.families.base import ModelDescription, TensorRule
from grpo_megatron.families.decoder import decoder_rules
from grpo_megatron.families.known import llama


def describe(config: Mapping[str, Any]) -> ModelDescription:
    """Fields of a Qwen2Config. `sliding_window` counts only where `use_sliding_window` is true."""
    fields = {"max_position_embeddings": 32768, **config}
    fields.pop("attention_bias", None)  # Qwen2 has these biases whatever the field says
    if not config.get("use_sliding_window", False):
        fields.pop("sliding_window", None)
    return replace(llama.describe(fields), family="qwen2", attention_bias=True)


def tensor_rules(description: ModelDescription) -> tuple[TensorRule, ...]:
    """The table shared by dense decoders; biases as the description says."""
    return decoder_rules(description)
