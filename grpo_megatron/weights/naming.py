"""Names of a rank's parameters as the family's table has them: layers numbered over the whole model."""

import re
from collections.abc import Iterable, Sequence

import torch

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Transformer Engine's layer spec fuses each norm into the projection behind it.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside data-parallel and precision wrappers, which keep it as `module`."""
    while isinstance(inner := getattr(module, "module", None), torch.nn.Module):
        module = inner
    return module


def parameters_by_name(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Every parameter of this rank's chunks under its global megatron-core name.

    Example: on the second of two stages with two layers each, `decoder.layers.0.mlp.linear_fc2.weight` of the module is
    `decoder.layers.2.mlp.linear_fc2.weight` here, since megatron-core numbers that layer 3 (from 1).
    """
    found: dict[str, torch.nn.Parameter] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        for local_name, parameter in model.named_parameters():
            name = local_name
            if match := _LAYER.fullmatch(local_name):
                number = int(model.decoder.layers[int(match[1])].layer_number) - 1  # type: ignore[union-attr, index]
                name = f"decoder.layers.{number}.{_FUSED_NORMS.get(match[2], match[2])}"
            assert name not in found, f"two chunks of this rank hold {name}"
            found[name] = parameter
    return found


def short_list(names: Iterable[str], limit: int = 12) -> str:
    """Names for a message: all of them if they are few, else the first and how many more."""
    ordered = list(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
