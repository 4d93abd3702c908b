"""Seeded sampling and probability renormalisation, in torch."""

import torch

_LOW = 0xFFFFFFFF


def _mix(state, word):
    word = (word * 0xCC9E2D51) & _LOW
    word = ((word << 15) | (word >> 17)) & _LOW
    word = (word * 0x1B873593) & _LOW
    state = state ^ word
    state = ((state << 13) | (state >> 19)) & _LOW
    return (state * 5 + 0xE6546B64) & _LOW


def murmur_hash32_cpu(seed, positions, columns):
    """MurmurHash3 of (seed low, seed high, position, column), one row per seed: what SGLang's Triton kernel computes.
    64-bit wrap-around leaves the low 32 bits right, so int64 arithmetic is enough."""
    seed, positions, columns = (t.to(torch.int64) for t in (seed, positions, columns))
    state = torch.zeros_like(seed)
    for word in (seed & _LOW, (seed >> 32) & _LOW, positions & _LOW):
        state = _mix(state, word)
    state = _mix(state[:, None], columns[None, :] & _LOW)
    state = state ^ 16
    state = state ^ (state >> 16)
    state = (state * 0x85EBCA6B) & _LOW
    state = state ^ (state >> 13)
    state = (state * 0xC2B2AE35) & _LOW
    return (state ^ (state >> 16)).to(torch.uint32)


def top_k_renorm_prob(probs, top_ks):
    """Keep each row's top_k largest probabilities (ties with the k-th stay) and rescale to sum 1."""
    k = top_ks.reshape(-1).long().clamp(1, probs.shape[-1])
    kth = probs.sort(-1, descending=True).values.gather(1, k[:, None] - 1)
    kept = probs.masked_fill(probs < kth, 0)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs, top_ps):
    """Keep each row's smallest set of tokens whose mass reaches top_p and rescale to sum 1."""
    ordered, index = probs.sort(-1, descending=True)
    drop = ordered.cumsum(-1) - ordered > top_ps.reshape(-1, 1)
    kept = torch.zeros_like(probs).scatter(1, index, ordered.masked_fill(drop, 0))
    return kept / kept.sum(-1, keepdim=True)
