"""Core attention of megatron-core's local layers on torch SDPA, with the block structure of packed rows.

megatron-core's own unfused attention knows no packed rows. This one takes the structure of `batch.MicroBatch`
in place of the attention mask: int32 [2, tokens], block ids and segment ids. A token attends to the earlier
tokens of its block that belong to segment 0 (the prompt) or to its own segment.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True)
class _Block:
    start: int
    end: int
    mask: torch.Tensor | None  # bool [length, length], True = attends; None: plain causal


_blocks_of_structure: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The same structure tensor goes through every layer: it is taken apart once."""


def split_into_blocks(structure: torch.Tensor) -> list[_Block]:
    """Blocks of a row from its structure, int32 [2, tokens]."""
    known = _blocks_of_structure.get(structure)
    if known is not None:
        return known
    block_ids, segment_ids = structure
    _, lengths = torch.unique_consecutive(block_ids, return_counts=True)
    blocks, start = [], 0
    for length in lengths.tolist():
        segments = segment_ids[start : start + length]
        mask = None
        if int(segments.max()) > 1:  # more than one answer shares the prompt
            index = torch.arange(length, device=segments.device)
            visible = (segments[None, :] == 0) | (segments[None, :] == segments[:, None])
            mask = visible & (index[:, None] >= index[None, :])
        blocks.append(_Block(start, start + length, mask))
        start += length
    _blocks_of_structure[structure] = blocks
    return blocks


class BlockAttention(MegatronModule):
    """Exact attention inside the blocks of one packed row; also plain causal attention where no structure is given."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(k_channels or config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """query, key, value: [tokens, rows, heads, channels]; returns [tokens, rows, heads * channels]."""
        assert packed_seq_params is None and attention_bias is None, "structure comes in place of the attention mask"
        if attention_mask is None:
            blocks = [_Block(0, query.size(0), None)]
        else:
            assert query.size(1) == 1, "a packed row is alone in its batch"
            blocks = split_into_blocks(attention_mask)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        outputs = [
            F.scaled_dot_product_attention(
                query[:, :, block.start : block.end],
                key[:, :, block.start : block.end],
                value[:, :, block.start : block.end],
                attn_mask=block.mask,
                is_causal=block.mask is None,
                scale=self.softmax_scale,
                enable_gqa=query.size(1) != key.size(1),
            )
            for block in blocks
        ]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return output.permute(2, 0, 1, 3).reshape(output.size(2), output.size(0), -1)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Nothing to save: attention has no parameters."""
        return {}
