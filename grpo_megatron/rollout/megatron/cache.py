"""The tensors of the key-value cache: allocation, zeroing, writing, copying, and really freeing them."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

BlockLayout = Literal["head_major", "token_major"]


@dataclass(frozen=True)
class CacheShape:
    """Sizes of one rank's part of the cache."""

    num_layers: int
    num_heads: int
    """Key-value heads of this tensor-parallel rank."""
    channels: int
    num_blocks: int
    block_tokens: int
    dtype: torch.dtype
    layout: BlockLayout
    """Inside a block: `head_major` [heads, tokens, channels] for torch attention, `token_major` [tokens, heads,
    channels] for flash-attn."""

    @property
    def padding_block(self) -> int:
        """One more block behind the others, which padding tokens write to and padded tables point to."""
        return self.num_blocks

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        inner = (
            (self.num_heads, self.block_tokens) if self.layout == "head_major" else (self.block_tokens, self.num_heads)
        )
        return (self.num_layers, self.num_blocks + 1, *inner, self.channels)

    @property
    def num_bytes(self) -> int:
        return 2 * int(np.prod(self.tensor_shape)) * self.dtype.itemsize


class KeyValueCache:
    """Keys and values of all layers of this rank, in blocks.

    Everything is zero before it is written. Attention multiplies masked positions by zero, so a NaN in memory that
    nobody ever wrote would spread into every answer that is computed beside it.
    """

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        self._device = device
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.allocate()

    @property
    def is_allocated(self) -> bool:
        return self.keys is not None

    @property
    def num_bytes(self) -> int:
        """Bytes held at the moment."""
        return self.shape.num_bytes if self.is_allocated else 0

    def allocate(self) -> None:
        """Make the tensors, all zero; nothing happens if they are there."""
        if not self.is_allocated:
            self.keys, self.values = self._zeros(), self._zeros()

    def free(self) -> None:
        self.keys = self.values = None

    def clear(self) -> None:
        """Back to zero, for the case that something not finite was written."""
        if self.keys is not None and self.values is not None:
            self.keys.zero_()
            self.values.zero_()

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store [tokens, heads, channels] at `rows`, which `write_rows` made."""
        assert self.keys is not None and self.values is not None, "the cache is asleep"
        width = self.shape.channels if self.shape.layout == "head_major" else self.shape.channels * self.shape.num_heads
        self.keys[layer].view(-1, width).index_copy_(0, rows, key.reshape(-1, width))
        self.values[layer].view(-1, width).index_copy_(0, rows, value.reshape(-1, width))

    def write_rows(self, blocks: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """int64 rows of the flattened cache for tokens at `offsets` in `blocks`."""
        if self.shape.layout == "token_major":
            return blocks * self.shape.block_tokens + offsets
        heads = np.arange(self.shape.num_heads)
        first = (blocks[:, None] * self.shape.num_heads + heads) * self.shape.block_tokens
        return (first + offsets[:, None]).reshape(-1)

    def gather_rows(self, tables: np.ndarray) -> np.ndarray:
        """int64 [sequences * heads * blocks]: rows of the cache seen as [blocks * heads, ...], head-major only."""
        heads = np.arange(self.shape.num_heads)
        return (tables[:, None, :] * self.shape.num_heads + heads[None, :, None]).reshape(-1)

    def copy_blocks(self, sources: list[int], destinations: list[int]) -> None:
        """Copy whole blocks of all layers."""
        assert self.keys is not None and self.values is not None, "the cache is asleep"
        source = torch.tensor(sources, device=self._device)
        destination = torch.tensor(destinations, device=self._device)
        for tensor in (self.keys, self.values):
            tensor.index_copy_(1, destination, tensor.index_select(1, source))

    def _zeros(self) -> torch.Tensor:
        if self._device.type != "cpu":
            return torch.zeros(self.shape.tensor_shape, dtype=self.shape.dtype, device=self._device)
        # numpy's zeros are pages that the system gives, zeroed, when they are first touched: a cache for 64 long
        # answers costs nothing while only short ones are written.
        raw = np.zeros(self.shape.num_bytes // 2, dtype=np.uint8)
        return torch.from_numpy(raw).view(self.shape.dtype).view(self.shape.tensor_shape)
