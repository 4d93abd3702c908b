"""Where the tokens of a request live in the paged key-value cache: the small integer kernels.

Names and argument order are those of SGLang's kernels. `req_to_token` [requests, positions] holds the cache slot of
each token. Batches are tens of requests, so plain loops are fast enough.
"""

import ctypes
from collections.abc import Iterator

import torch


def copy_all_layer_kv_cache(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Move slots in every layer's buffer, given by its address and the bytes of one slot; may overlap."""
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        base = address & (1 << 64) - 1  # addresses come as signed numbers
        rows = [ctypes.string_at(base + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + target * stride, row, stride)


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write new slots, one request after the other, at positions start to end of each request's row."""
    for row, positions, places in _stretches(req_pool_indices, start_offset, end_offset):
        req_to_token[row, positions] = out_cache_loc[places].to(req_to_token.dtype)


def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read the slots at positions start to end of each request's row, one request after the other."""
    for row, positions, places in _stretches(req_pool_indices, start_offset, end_offset):
        out_cache_loc[places] = req_to_token[row, positions].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the slots for topk x num_steps draft tokens that follow each request's tokens."""
    count = topk * num_steps
    for index, (row, start) in enumerate(_rows(req_pool_indices, seq_lens)):
        slots = req_to_token[row, start : start + count]
        out_cache_loc[index * count : (index + 1) * count] = slots.to(out_cache_loc.dtype)


def rotate_input_ids(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one and put its new token last, or where `select_index` says."""
    fresh = topk_index.reshape(-1).tolist()
    places = None if select_index is None else select_index.tolist()
    for index, (start, count) in enumerate(_rows(extend_start_loc, extend_seq_lens)):
        if count > 0:
            input_ids[start : start + count - 1] = input_ids[start + 1 : start + count].clone()
            input_ids[start + count - 1 if places is None else places[index]] = fresh[index]


def fill_bonus_tokens(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """The last accepted token of each request; requests are `accept_stride` apart."""
    lengths = accept_lens.reshape(-1).long()
    last = torch.arange(lengths.numel(), device=lengths.device) * accept_stride + lengths - 1
    bonus_tokens[: lengths.numel()] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """The slots of the accepted tokens, packed to the front; -1 marks what was rejected."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def build_draft_decode_metadata(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """One row of slots per request and branch: the request's tokens, then that branch's draft tokens.

    The drafts' slots follow the tokens, one branch after the other.
    """
    longest = int(seq_lens.max()) if seq_lens.numel() else 0
    rows = torch.zeros((seq_lens.numel() * topk, longest + num_steps), dtype=req_to_token.dtype)
    for index, (request, length) in enumerate(_rows(req_pool_indices, seq_lens)):
        for branch in range(topk):
            row, drafts = rows[index * topk + branch], length + branch * num_steps
            row[:length] = req_to_token[request, :length]
            row[length : length + num_steps] = req_to_token[request, drafts : drafts + num_steps]
    return rows


def _stretches(
    rows: torch.Tensor, start_offset: torch.Tensor, end_offset: torch.Tensor
) -> Iterator[tuple[int, slice, slice]]:
    """Each request's row, its positions start to end, and where they lie when all requests follow one another."""
    place = 0
    for row, start, end in _rows(rows, start_offset, end_offset):
        count = max(end - start, 0)
        yield row, slice(start, start + count), slice(place, place + count)
        place += count


def _rows(*columns: torch.Tensor) -> zip:
    return zip(*(column.tolist() for column in columns), strict=True)
