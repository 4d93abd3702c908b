"""Does the model that was built say the same as the checkpoint's config.json? Every difference by name."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from grpo_megatron.families.base import ModelDescription
from grpo_megatron.families.rotary import inverse_frequencies
from grpo_megatron.weights.naming import unwrap

# End tokens are a matter of generation: they change no weight and no log-prob.
_IRRELEVANT_FIELDS = ("eos_token_ids",)
_CONFIG_FIELDS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_size",
    "layernorm_epsilon": "norm_epsilon",
    "add_qkv_bias": "attention_bias",
    "add_bias_linear": "mlp_bias",
}
_FREQUENCY_TOLERANCE = 1e-5  # relative; float32 against Python's double


def description_differences(description: ModelDescription, stored: ModelDescription) -> list[str]:
    """Fields in which the model to build and the checkpoint's config.json differ."""
    return [
        f"{field.name}: the model has {getattr(description, field.name)}, the checkpoint {getattr(stored, field.name)}"
        for field in fields(ModelDescription)
        if field.name not in _IRRELEVANT_FIELDS and getattr(description, field.name) != getattr(stored, field.name)
    ]


def model_differences(chunks: Sequence[torch.nn.Module], description: ModelDescription) -> list[str]:
    """Fields in which the built modules differ from the description, for example after an override."""
    problems: dict[str, None] = {}
    for chunk in chunks:
        model: Any = unwrap(chunk)
        found = {ours: getattr(model.config, theirs, None) for theirs, ours in _CONFIG_FIELDS.items()}
        found["tie_embeddings"] = getattr(model, "share_embeddings_and_output_weights", None)
        for name, value in found.items():
            expected = getattr(description, name)
            if value is not None and value != expected:
                problems[f"{name}: the built model has {value}, its description {expected}"] = None
        problems |= dict.fromkeys(_rotary_differences(model, description))
    return list(problems)


def _rotary_differences(model: Any, description: ModelDescription) -> list[str]:
    """Base and scaling, seen in the frequencies that the model really rotates by."""
    embedding = getattr(model, "rotary_pos_emb", None)
    if embedding is None:
        return []
    built = embedding.inv_freq.detach().double().cpu()
    expected = torch.tensor(inverse_frequencies(description), dtype=torch.float64)
    if built.shape == expected.shape and torch.allclose(built, expected, rtol=_FREQUENCY_TOLERANCE, atol=0.0):
        return []
    return [
        f"rope_theta, rope_scaling: the built model's rotary frequencies are not those of rope_theta "
        f"{description.rope_theta}, rope_scaling {description.rope_scaling}"
    ]
