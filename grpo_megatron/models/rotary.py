"""Rotary position embedding by position, not by index: packed rows restart positions inside a row."""

import torch


def rotary_angles(inverse_frequency: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float32 [tokens, 1, 1, head_size] for int64 [tokens]; the layout that megatron-core's layers rotate by."""
    angles = torch.outer(positions.float(), inverse_frequency)
    return torch.cat((angles, angles), dim=-1)[:, None, None, :]
