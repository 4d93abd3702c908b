"""flash-attn's two paged entry points, one sequence after another: the contract that megatron-core counts on."""

from typing import Any

import torch
import torch.nn.functional as F


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None) -> torch.Tensor:
    """query [q, heads, channels], the last q positions of keys and values [k, kv heads, channels]."""
    offset = keys.size(0) - query.size(0)
    mask = torch.arange(keys.size(0))[None] <= torch.arange(query.size(0))[:, None] + offset
    query, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query, keys, values))
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)[
        0
    ].transpose(0, 1)


def _read(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """[length, heads, channels] out of [blocks, block tokens, heads, channels]."""
    blocks = -(-length // cache.size(1))
    return cache[table[:blocks].long()].flatten(0, 1)[:length]


def flash_attn_varlen_func(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, query_bounds: torch.Tensor,
    key_bounds: torch.Tensor, max_query: int, max_key: int, *, softmax_scale: float, causal: bool, block_table: Any
) -> torch.Tensor:  # fmt: skip
    assert causal
    output = torch.full_like(query, float("nan"))  # what no sequence covers is not defined
    bounds, key_ends = query_bounds.tolist(), key_bounds.tolist()
    for place in range(len(bounds) - 1):
        start, end, length = bounds[place], bounds[place + 1], key_ends[place + 1] - key_ends[place]
        assert end - start <= max_query and length <= max_key
        keys, values = (_read(cache, block_table[place], length) for cache in (key_cache, value_cache))
        output[start:end] = _attend(query[start:end], keys, values, softmax_scale)
    return output


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache_seqlens: torch.Tensor, causal: bool,
    block_table: torch.Tensor, num_splits: int
) -> torch.Tensor:  # fmt: skip
    assert causal and q.size(1) == 1 and q.size(0) == cache_seqlens.size(0) == block_table.size(0)
    rows = []
    for query, length, table in zip(q, cache_seqlens.tolist(), block_table, strict=True):
        rows.append(_attend(query, _read(k_cache, table, length), _read(v_cache, table, length), None))
    return torch.stack(rows)
