"""Normalization and rotary embedding with fewer passes over memory; SGLang's numbers, bit for bit."""

import torch

from .once import OncePerForward


def normalize(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The root-mean-square norm of x (+ residual), and the sum where there is a residual; float32 inside."""
    hidden = x.to(torch.float32, copy=True)
    if residual is not None:
        hidden += residual
        residual = hidden.to(x.dtype, copy=True)
    variance = hidden.pow(2).mean(dim=-1, keepdim=True)
    hidden *= variance.add_(epsilon).rsqrt_()
    hidden *= weight
    return hidden.to(x.dtype), residual


def rotate(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of whole heads, halves against halves. [tokens, heads x head size] each.

    Args:
        cos_sin_cache: [positions, head size], cosines and then sines.
    """
    cos, sin = _cos_and_sin(positions, cos_sin_cache, query.dtype)
    num_tokens, width = query.shape
    if _are_neighbours(query, key):  # slices of one product in most models: one go for both
        both = query.as_strided((num_tokens, width + key.size(1)), query.stride())
        rotated = _rotate_heads(both, cos, sin)
        return rotated[:, :width], rotated[:, width:]
    return _rotate_heads(query, cos, sin), _rotate_heads(key, cos, sin)


def _are_neighbours(query: torch.Tensor, key: torch.Tensor) -> bool:
    return (
        query.stride() == key.stride()
        and query.stride(1) == 1
        and query.stride(0) >= query.size(1) + key.size(1)
        and key.data_ptr() == query.data_ptr() + query.size(1) * query.element_size()
        and query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    )


def _gather_cos_and_sin(
    positions: torch.Tensor, cache: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, 1, head size] each: (cos, cos) and (-sin, sin)."""
    cos, sin = cache.index_select(0, positions.flatten()).to(dtype)[:, None].chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


_cos_and_sin = OncePerForward(_gather_cos_and_sin)


def _rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Each head's halves (a, b) become (a cos - b sin, b cos + a sin)."""
    heads = x.view(x.size(0), -1, cos.size(-1))
    first, second = heads.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return (heads * cos).add_(swapped.mul_(sin)).view(x.shape)
