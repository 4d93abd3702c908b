"""Global names of parameters: virtual stages, wrappers, and Transformer Engine's fused norms."""

import pytest
import torch

from grpo_megatron.weights.naming import parameters_by_name, short_list

pytestmark = pytest.mark.unit


def _module(**parts: torch.nn.Module) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def _layer(number: int) -> torch.nn.Module:
    """What a Transformer Engine layer calls its first norm; megatron-core numbers layers from 1."""
    projection = torch.nn.Module()
    projection.layer_norm_weight = torch.nn.Parameter(torch.ones(1))
    layer = _module(self_attention=_module(linear_qkv=projection))
    layer.layer_number = number
    return layer


def _chunk(*numbers: int) -> torch.nn.Module:
    """A chunk as it comes out of the optimizer's set-up: wrapped twice."""
    layers = torch.nn.ModuleList(_layer(number) for number in numbers)
    return _module(module=_module(module=_module(decoder=_module(layers=layers))))


def test_layers_of_virtual_stages_and_fused_norms_have_their_global_names() -> None:
    """The second of two stages with two virtual stages holds layers 2, 3, 6, 7 of 8 (from 0)."""
    chunks = [_chunk(3, 4), _chunk(7, 8)]
    found = parameters_by_name(chunks)
    assert list(found) == [f"decoder.layers.{layer}.input_layernorm.weight" for layer in (2, 3, 6, 7)]
    last = chunks[1].module.module.decoder.layers[1].self_attention.linear_qkv.layer_norm_weight
    assert found["decoder.layers.7.input_layernorm.weight"] is last


def test_two_chunks_with_the_same_layer_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="two chunks of this rank hold decoder.layers.2"):
        parameters_by_name([_chunk(3), _chunk(3)])


def test_long_lists_of_names_are_cut_and_counted() -> None:
    assert short_list(["a", "b"]) == "a, b"
    assert short_list("abcde", limit=2) == "a, b and 3 more"
