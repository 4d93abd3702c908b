"""Where tokens of a request live in the paged KV cache: the small integer kernels, in torch."""

import ctypes

import torch


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    src, tgt = src_loc.tolist(), tgt_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist()):
        base &= (1 << 64) - 1
        rows = [ctypes.string_at(base + s * stride, stride) for s in src]  # read all, then write: safe in place
        for t, r in zip(tgt, rows):
            ctypes.memmove(base + t * stride, r, stride)


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    off = 0
    for r, s, e in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        n = e - s
        if n > 0:
            req_to_token[r, s:e] = out_cache_loc[off : off + n].to(req_to_token.dtype)
            off += n


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    off = 0
    for r, s, e in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        n = e - s
        if n > 0:
            out_cache_loc[off : off + n] = req_to_token[r, s:e].to(out_cache_loc.dtype)
            off += n


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    n = topk * num_steps
    for i, (r, s) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        out_cache_loc[i * n : (i + 1) * n] = req_to_token[r, s : s + n].to(out_cache_loc.dtype)


def rotate_input_ids_cpu(input_ids, extend_start_loc, extend_seq_lens, topk_index, select_index=None):
    new = topk_index.reshape(-1).tolist()
    sel = None if select_index is None else select_index.tolist()
    for i, (s, n) in enumerate(zip(extend_start_loc.tolist(), extend_seq_lens.tolist())):
        if n <= 0:
            continue
        input_ids[s : s + n - 1] = input_ids[s + 1 : s + n].clone()
        input_ids[sel[i] if sel is not None else s + n - 1] = new[i]


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    bs = accept_lens.numel()
    idx = torch.arange(bs) * accept_stride + accept_lens.reshape(-1).long() - 1
    bonus_tokens[:bs] = accept_tokens.reshape(-1)[idx].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    idx = accept_index.reshape(-1)
    idx = idx[idx > -1].long()
    accept_out_cache_loc[: idx.numel()] = out_cache_loc[idx].to(accept_out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """One row per (request, branch): the committed prefix followed by that branch's draft slots.
    Draft slots of a request lie at req_to_token[req, seq_len : seq_len + topk*num_steps], branch-major."""
    bs = seq_lens.numel()
    lens = seq_lens.tolist()
    out = torch.zeros((bs * topk, max(lens) + num_steps), dtype=req_to_token.dtype)
    for b, (r, L) in enumerate(zip(req_pool_indices.tolist(), lens)):
        for t in range(topk):
            row = out[b * topk + t]
            row[:L] = req_to_token[r, :L]
            row[L : L + num_steps] = req_to_token[r, L + t * num_steps : L + (t + 1) * num_steps]
    return out
