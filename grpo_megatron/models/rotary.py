"""Rotary position embedding by position, not by index: packed rows restart positions inside a row."""

import math

import torch

from grpo_megatron.families.base import ModelDescription


def inverse_frequencies(description: ModelDescription) -> torch.Tensor:
    """float32 [head_size / 2], scaled as Llama 3 does (arXiv 2407.21783, section 3.4.1) if the model asks for it."""
    exponents = torch.arange(0, description.head_size, 2, dtype=torch.int64).float() / description.head_size
    frequencies = 1.0 / (description.rope_theta**exponents)
    scaling = description.rope_scaling
    if scaling is None:
        return frequencies
    assert scaling.kind == "llama3", f"the family should have refused rope scaling {scaling.kind}"
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_positions / scaling.low_freq_factor
    shortest = scaling.original_max_positions / scaling.high_freq_factor
    slowed = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    share = (scaling.original_max_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share) * slowed / scaling.factor + share * slowed
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, slowed)


def rotary_angles(inverse_frequency: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float32 [tokens, 1, 1, head_size] for int64 [tokens]; the layout that megatron-core's layers rotate by."""
    angles = torch.outer(positions.float(), inverse_frequency)
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]
