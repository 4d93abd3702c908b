"""Checksums of tensors that come out the same in every process and on every device."""

import zlib
from functools import cache

import torch

_CHUNK_WORDS = 1 << 16  # 512 KiB of int64 words: the temporaries stay in cache; part of the definition
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_MASK = (1 << 63) - 1


def checksum(tensor: torch.Tensor) -> int:
    """63 bits over bytes, order, dtype and shape. Computed where the tensor lies, without a copy of it.

    Words are mixed and multiplied with odd weights that differ per position, modulo 2^64, so that a changed, moved or
    swapped value changes the sum. It guards against mistakes, not against attackers.
    """
    data = tensor.detach().contiguous().reshape(-1)
    words, tail = _as_words(data)
    total = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    weights = _weights(data.device)
    parts = [
        (chunk >> 29).bitwise_xor_(chunk).mul_(weights[: chunk.numel()]).sum() for chunk in words.split(_CHUNK_WORDS)
    ]
    for part in torch.stack(parts).tolist():  # one wait for the device
        total = (total * _MULTIPLIER + part) & 0xFFFFFFFFFFFFFFFF
    total = (total * _MULTIPLIER + zlib.crc32(tail)) & 0xFFFFFFFFFFFFFFFF
    return (total ^ (total >> 31)) & _MASK


def _as_words(data: torch.Tensor) -> tuple[torch.Tensor, bytes]:
    """The bytes as int64 words, and the up to seven bytes that are left over."""
    data = data.view(torch.uint8)
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    num_whole = data.numel() // 8 * 8
    return data[:num_whole].view(torch.int64), bytes(data[num_whole:].tolist())


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd int64 numbers, one per word of a chunk."""
    position = torch.arange(1, _CHUNK_WORDS + 1, dtype=torch.int64, device=device)
    spread = position * (_MULTIPLIER - (1 << 64))
    return torch.bitwise_xor(spread, spread >> 31) | 1
