"""Paged attention in torch, behind the two operators that SGLang's IntelAMXAttnBackend calls.

Decode gathers each request's pages into one padded batch and makes a single SDPA call; extend does one SDPA call per
request.  Page tables and masks are the same in every layer, so they are computed once per forward (`_Once`)."""

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa


class _Once:
    """Remembers one value for the tensors it was computed from.  It keeps those tensors, so an `id` can't be reused, and
    compares their version counters, so an in-place write is noticed."""

    def __init__(self):
        self.key = self.tensors = self.value = None

    def __call__(self, make, *args):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if any(t.is_inference() for t in tensors):  # these have no version counter
            return make(*args)
        key = [(id(a), a._version) if isinstance(a, torch.Tensor) else a for a in args]
        if key != self.key:
            self.value = make(*args)
            self.key, self.tensors = key, tensors
        return self.value


_decode_once, _extend_once = _Once(), _Once()


def _only_plain(is_cross, sinks, logit_cap):
    if is_cross or sinks is not None or logit_cap:
        raise NotImplementedError("CPU stand-in: no cross attention, attention sinks or logit capping")


def _decode_plan(req_to_token, req_pool_indices, seq_lens, window):
    longest = int(seq_lens.max())
    pages = req_to_token[req_pool_indices, :longest].long()
    position = torch.arange(longest)
    mask = position < seq_lens[:, None]
    if window > 0:  # window counts the query itself
        mask &= position >= seq_lens[:, None] - window
    return pages.reshape(-1), longest, mask[:, None, None, :]


def _gather(buffer, pages, batch, length, dtype):
    """[pages, heads, dim] -> [batch, heads, length, dim] (a view: heads stay interleaved)."""
    heads, dim = buffer.shape[1:]
    if buffer.is_contiguous():
        rows = buffer.view(-1, heads * dim).index_select(0, pages)
    else:  # MLA: the value buffer is a slice of the key buffer
        rows = buffer.index_select(0, pages)
    return rows.view(batch, length, heads, dim).transpose(1, 2).to(dtype)


def decode_attention_cpu(
    q,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    o,
    k,
    v,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    sm_scale,
    logit_cap,
    is_cross,
    sliding_window,
    encoder_lens,
    sinks=None,
):
    _only_plain(is_cross, sinks, logit_cap)
    shared = k_buffer.data_ptr() == v_buffer.data_ptr()  # MLA: values are the leading part of the keys
    if k is not None:
        k_buffer.index_copy_(0, loc.long(), k.reshape(-1, *k_buffer.shape[1:]).to(k_buffer.dtype))
        if not shared:
            v_buffer.index_copy_(0, loc.long(), v.reshape(-1, *v_buffer.shape[1:]).to(v_buffer.dtype))
    pages, length, mask = _decode_once(_decode_plan, req_to_token, req_pool_indices, seq_lens, sliding_window)
    batch, heads, dim = q.shape
    keys = _gather(k_buffer, pages, batch, length, q.dtype)
    values = keys[..., : v_buffer.shape[-1]] if shared else _gather(v_buffer, pages, batch, length, q.dtype)
    groups = keys.shape[1]  # grouped queries play the part of query positions
    out = sdpa(q.view(batch, groups, heads // groups, dim), keys, values, attn_mask=mask, scale=sm_scale)
    o.copy_(out.reshape(o.shape))


def _extend_plan(
    req_to_token, req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, window, tree_mask, is_causal
):
    plan = []
    rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), extend_start_loc.tolist())
    offset = 0
    for row, length, new, start in rows:
        if new == 0:
            continue
        mask = None
        if tree_mask is not None:  # QLEN_ONLY: one [new, new] block per request
            block = tree_mask.view(-1)[offset : offset + new * new].view(new, new).bool()
            offset += new * new
            mask = torch.cat([torch.ones(new, length - new, dtype=torch.bool), block], 1)
        elif is_causal and new > 1 and new != length:
            mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        if window > 0 and is_causal:
            mask = torch.ones(new, length, dtype=torch.bool).tril(length - new) if mask is None else mask
            mask = mask & torch.ones(new, length, dtype=torch.bool).triu(length - new - window + 1)
        plan.append(
            (
                start,
                new,
                length - new,
                req_to_token[row, :length].long(),
                mask,
                is_causal and mask is None and new == length,
            )
        )
    return plan


def _with_prefix(x, buffer, start, new, prefix, pages, dtype):
    """The prefix comes from the cache and the new tokens from the arguments: for MLA without a prefix SGLang passes whole
    heads while the cache holds the latent.  Without arguments (shared layers) all of it comes from the cache."""
    if x is None:
        return _gather(buffer, pages, 1, prefix + new, dtype)
    fresh = x.view(x.shape[0], -1, x.shape[-1] if x.dim() == 3 else buffer.shape[-1])[start : start + new].transpose(
        0, 1
    )[None]
    if prefix == 0:
        return fresh
    return torch.cat([_gather(buffer, pages[:prefix], 1, prefix, dtype), fresh], 2)


def extend_attention_cpu(
    q,
    k,
    v,
    o,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_len_extend,
    sm_scale,
    logit_cap,
    is_cross,
    sliding_window,
    encoder_lens,
    sinks=None,
    tree_mask=None,
    is_causal=True,
):
    _only_plain(is_cross, sinks, logit_cap)
    plan = _extend_once(
        _extend_plan,
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_seq_lens,
        extend_start_loc,
        sliding_window,
        tree_mask,
        is_causal,
    )
    for start, new, prefix, pages, mask, causal in plan:
        keys, values = (
            _with_prefix(x, buffer, start, new, prefix, pages, q.dtype) for x, buffer in ((k, k_buffer), (v, v_buffer))
        )
        query = q[start : start + new].transpose(0, 1)[None]
        out = sdpa(query, keys, values, attn_mask=mask, is_causal=causal, scale=sm_scale, enable_gqa=True)
        o[start : start + new] = out[0].transpose(0, 1)
