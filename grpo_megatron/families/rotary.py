"""Rotary frequencies from a description, in plain Python: the reference that a built model is checked against."""

import math

from grpo_megatron.families.base import ModelDescription, RopeScaling


def inverse_frequencies(description: ModelDescription) -> tuple[float, ...]:
    """One angle per position and pair of dimensions, [head_size / 2]; scaled as HF transformers does."""
    size = description.head_size
    plain = [description.rope_theta ** (-i / size) for i in range(0, size, 2)]
    scaling = description.rope_scaling
    return tuple(plain if scaling is None else (_scale(frequency, scaling) for frequency in plain))


def _scale(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3.1: long waves are divided by the factor, short ones kept, those between interpolated."""
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    if turns > scaling.high_freq_factor:
        return frequency
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency
