"""Paged attention in torch, behind the two operators that SGLang's CPU attention backend calls.

Buffers are [slots, heads, size]; `req_to_token` [requests, positions] holds the slot of each token. Decoding gathers
the slots of all requests into one padded batch and makes a single call; extending makes one call per request. Which
slots, and the masks, are the same in every layer and computed once per forward.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from .once import OncePerForward

_MANY_PRODUCTS = 16
"""Requests times key heads from which on decoding by matrix products is faster."""


class DecodePlan(NamedTuple):
    """One token per request: the slots it sees, padded to the longest."""

    rows: torch.Tensor  # [batch x heads x longest], of the cache as [slots x heads, size]
    longest: int
    bias: torch.Tensor | None  # float32 [batch, 1, 1, longest], -inf where a request has no token


class ExtendPlan(NamedTuple):
    """The new tokens of one request."""

    start: int
    """Of its rows among all new tokens."""
    num_new: int
    num_before: int
    slots: torch.Tensor  # [num_before + num_new]
    mask: torch.Tensor | None  # bool [num_new, num_before + num_new]
    is_causal: bool
    """The mask is the plain triangle, which needs no tensor."""


def plan_decode(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, window: int, heads: int
) -> DecodePlan:
    """Cache rows and bias for one new token per request; `window` counts the token itself, 0 or less is no window."""
    longest = int(seq_lens.max())
    slots = req_to_token[req_pool_indices, :longest].long()
    position = torch.arange(longest)
    hidden = position >= seq_lens[:, None]
    # Slot 0 belongs to nobody: what lies elsewhere may be NaN, which a weight of zero does not take away.
    slots = slots.masked_fill(hidden, 0)
    rows = (slots[:, None, :] * heads + torch.arange(heads)[None, :, None]).view(-1)
    if window > 0:
        hidden |= position < seq_lens[:, None] - window
    if not hidden.any():
        return DecodePlan(rows, longest, None)
    bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return DecodePlan(rows, longest, bias[:, None, None, :])


def plan_extend(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    window: int,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> list[ExtendPlan]:
    """Slots and masks of every request that has new tokens. `tree_mask`: a square of the new tokens per request."""
    plans, place = [], 0
    columns = (req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc)
    for row, length, num_new, start in zip(*(column.tolist() for column in columns), strict=True):
        before = length - num_new
        mask: torch.Tensor | None = None
        if num_new == 0:
            continue
        if tree_mask is not None:
            square = tree_mask.view(-1)[place : place + num_new * num_new].view(num_new, num_new).bool()
            mask = torch.cat([torch.ones(num_new, before, dtype=torch.bool), square], dim=1)
            place += num_new * num_new
        elif is_causal and (window > 0 or (num_new > 1 and before > 0)):
            mask = torch.ones(num_new, length, dtype=torch.bool).tril(before)
        if window > 0 and is_causal:
            near = torch.ones(num_new, length, dtype=torch.bool).triu(before - window + 1)
            mask = near if mask is None else mask & near
        plain = is_causal and mask is None and before == 0
        plans.append(ExtendPlan(start, num_new, before, req_to_token[row, :length].long(), mask, plain))
    return plans


_decode_plan, _extend_plan = OncePerForward(plan_decode), OncePerForward(plan_extend)


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    o: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,
    sliding_window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of one new token per request into `o`; writes its key and value to slot `loc` first."""
    _refuse(is_cross, sinks, logit_cap, k_buffer)
    shared = k_buffer.data_ptr() == v_buffer.data_ptr()  # MLA: values are the leading part of the keys
    if k is not None and v is not None:
        slots = loc.long()
        k_buffer.index_copy_(0, slots, k.reshape(-1, *k_buffer.shape[1:]).to(k_buffer.dtype))
        if not shared:
            v_buffer.index_copy_(0, slots, v.reshape(-1, *v_buffer.shape[1:]).to(v_buffer.dtype))
    batch, num_heads, size = q.shape
    heads = k_buffer.shape[1]
    plan = _decode_plan(req_to_token, req_pool_indices, seq_lens, sliding_window, heads)
    shape = (batch, heads, plan.longest, -1)
    keys = _as_rows(k_buffer).index_select(0, plan.rows).view(shape)
    values = keys[..., : v_buffer.shape[-1]] if shared else _as_rows(v_buffer).index_select(0, plan.rows).view(shape)
    query = q.view(batch, heads, num_heads // heads, size)  # query heads that share a key head are rows of one matrix
    many = batch * heads >= _MANY_PRODUCTS and keys.dtype == q.dtype == torch.bfloat16
    attend = _attend_in_two_products if many else _attend
    o.copy_(attend(query, keys.to(q.dtype), values.to(q.dtype), plan.bias, sm_scale).reshape(o.shape))


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The plain version, for anything: [batch, heads, rows, size]."""
    bias = None if bias is None else bias.to(query.dtype)
    return scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale)


def _attend_in_two_products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """The fast version, for bfloat16: half the time of the plain one from some 16 matrices on, and as accurate.

    A product of bfloat16 matrices adds up in float32 and rounds once; the same product again, with that result
    subtracted before the rounding, is what the rounding took away. Their sum has 16 bits.
    """
    batch, heads, rows, _ = query.shape
    query, keys, values = query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1)
    rounded = torch.bmm(query, keys)
    scores = rounded.float().add_(torch.baddbmm(rounded, query, keys, beta=-1)).mul_(scale)
    if bias is not None:
        scores.view(batch, heads, rows, -1).add_(bias)
    return torch.bmm(scores.softmax(dim=-1).to(values.dtype), values)


def extend_attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    o: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross: bool,
    sliding_window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Attention of many new tokens per request into `o`; they are in the cache already."""
    _refuse(is_cross, sinks, logit_cap, k_buffer)
    plans = _extend_plan(
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_seq_lens,
        extend_start_loc,
        sliding_window,
        tree_mask,
        is_causal,
    )
    for plan in plans:
        keys, values = _all_tokens(k, k_buffer, plan, q.dtype), _all_tokens(v, v_buffer, plan, q.dtype)
        rows = slice(plan.start, plan.start + plan.num_new)
        query = q[rows].transpose(0, 1)[None]
        out = scaled_dot_product_attention(
            query, keys, values, attn_mask=plan.mask, is_causal=plan.is_causal, scale=sm_scale, enable_gqa=True
        )
        o[rows] = out[0].transpose(0, 1)


def _refuse(is_cross: bool, sinks: torch.Tensor | None, logit_cap: float, k_buffer: torch.Tensor) -> None:
    if is_cross or sinks is not None or logit_cap or k_buffer.dtype.itemsize < 2:
        raise ValueError(
            "attention without a GPU has no cross attention, no attention sinks, no logit capping and no key-value "
            "cache of 8 bits"
        )


def _as_rows(buffer: torch.Tensor) -> torch.Tensor:
    """[slots, heads, size] -> [slots x heads, size], a view."""
    if buffer.is_contiguous():
        return buffer.view(-1, buffer.shape[-1])
    assert buffer.shape[1] == 1, "only the values of MLA, of one head, are a slice of another buffer"
    return buffer[:, 0]


def _gather(buffer: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[slots, heads, size] -> a view [1, heads, length, size] of a copy of these slots."""
    heads, size = buffer.shape[1:]
    rows = buffer.view(-1, heads * size) if buffer.is_contiguous() else _as_rows(buffer)
    return rows.index_select(0, slots).view(1, -1, heads, size).transpose(1, 2).to(dtype)


def _all_tokens(new: torch.Tensor | None, buffer: torch.Tensor, plan: ExtendPlan, dtype: torch.dtype) -> torch.Tensor:
    """[1, heads, length, size]: earlier tokens from the cache, new ones from the arguments.

    MLA without earlier tokens passes whole heads, while the cache holds what they are made from. Layers that share
    another layer's cache pass nothing.
    """
    if new is None:
        return _gather(buffer, plan.slots, dtype)
    size = new.shape[-1] if new.dim() == 3 else buffer.shape[-1]
    rows = new[plan.start : plan.start + plan.num_new]
    fresh = rows.view(plan.num_new, -1, size).transpose(0, 1)[None]
    if plan.num_before == 0:
        return fresh
    return torch.cat([_gather(buffer, plan.slots[: plan.num_before], dtype), fresh], dim=2)
