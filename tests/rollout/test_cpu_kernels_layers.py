"""SGLang's layers with fewer passes over memory: bit for bit what the plain formulas give."""

import pytest
import torch

from grpo_megatron.rollout.sglang.cpu_kernels.grpo_megatron_sglang_cpu import layers

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_residual", [True, False])
def test_the_norm_is_that_of_the_float32_sum(dtype: torch.dtype, with_residual: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 48).to(dtype), torch.randn(48).to(dtype)
    residual = torch.randn(7, 48).to(dtype) if with_residual else None
    given = x.clone()
    normalized, total = layers.normalize(x, residual, weight, 1e-5)
    summed = x.float() + (0 if residual is None else residual.float())
    scale = torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(normalized, (summed * scale * weight).to(dtype))
    assert torch.equal(x, given)
    assert total is None if residual is None else torch.equal(total, summed.to(dtype))


def rotated(x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cos, sin = (half.to(x.dtype)[:, None] for half in cache[positions].chunk(2, dim=-1))
    first, second = x.view(len(x), -1, cache.size(-1)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).view(x.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("place", ["neighbours", "apart", "in the other order"])
def test_rotary_embedding_is_that_of_query_and_key_by_themselves(dtype: torch.dtype, place: str) -> None:
    torch.manual_seed(1)
    positions, cache = torch.tensor([0, 3, 11, 3]), torch.rand(12, 8) * 2 - 1
    product = torch.randn(4, 3 * 8 + 2 * 8 + 2 * 8).to(dtype)
    query, key, _ = product.split([24, 16, 16], dim=-1)
    if place == "apart":
        query, key = query.contiguous(), key.contiguous()
    elif place == "in the other order":
        key, query, _ = product.split([16, 24, 16], dim=-1)
    expected = rotated(query.contiguous(), positions, cache), rotated(key.contiguous(), positions, cache)
    for _ in range(2):  # the second time from what is remembered
        found = layers.rotate(positions, query, key, cache)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    moved = positions + 1 - positions  # other positions, all 1
    assert torch.equal(layers.rotate(moved, query, key, cache)[0], rotated(query.contiguous(), moved, cache))
