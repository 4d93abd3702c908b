"""The Llama family: Llama 2 and 3, SmolLM2, and whatever else says `model_type: llama`."""

from collections.abc import Mapping
from typing import Any

from grpo_megatron.families.base import ModelDescription, TensorRule
from grpo_megatron.families.decoder import decoder_rules
from grpo_megatron.families.reading import ConfigReader, refuse_unsupported_layers


def describe(config: Mapping[str, Any]) -> ModelDescription:
    """Fields of a LlamaConfig; defaults are those of transformers."""
    reader = ConfigReader(config)
    refuse_unsupported_layers(reader)
    reader.only("attention_bias", (False,), "Llama would then have a bias on its output projection too: not built here")
    reader.only("sliding_window", (), "sliding-window attention is not built here")
    num_heads = reader.integer("num_attention_heads")
    hidden_size = reader.integer("hidden_size")
    rope_theta, rope_scaling = reader.rope()
    description = ModelDescription(
        family="llama",
        num_layers=reader.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=reader.integer("intermediate_size"),
        num_attention_heads=num_heads,
        num_key_value_heads=reader.integer("num_key_value_heads", num_heads),
        head_size=reader.integer("head_dim", max(1, hidden_size // num_heads)),
        vocab_size=reader.integer("vocab_size"),
        max_positions=reader.integer("max_position_embeddings", 2048),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        norm_epsilon=reader.number("rms_norm_eps", 1e-6),
        tie_embeddings=reader.flag("tie_word_embeddings", False),
        eos_token_ids=reader.token_ids("eos_token_id"),
    )
    if num_heads % description.num_key_value_heads:
        reader.note(
            f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {description.num_key_value_heads}"
        )
    reader.finish()
    return description


def tensor_rules(description: ModelDescription) -> tuple[TensorRule, ...]:
    """The table shared by dense decoders; biases as the description says."""
    return decoder_rules(description)
