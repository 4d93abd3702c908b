"""SGLang's paged attention in torch against one head at a time in float64."""

import math

import pytest
import torch

from grpo_megatron.rollout.sglang.cpu_kernels.grpo_megatron_sglang_cpu import attention

pytestmark = pytest.mark.unit


def plain_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """One head: [new, size] x [length, size], `seen` bool [new, length], in float64."""
    scores = (query.double() @ keys.double().T) / math.sqrt(query.size(-1))
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ values.double()


class Cache:
    """A key-value cache whose slots are shuffled, and a table that knows where each request's tokens are."""

    def __init__(self, lengths: list[int], heads: int = 2, size: int = 8) -> None:
        torch.manual_seed(len(lengths))
        self.lengths = torch.tensor(lengths)
        self.keys, self.values = torch.randn(64, heads, size), torch.randn(64, heads, size)
        self.rows = torch.randperm(9)[: len(lengths)]
        self.table = torch.zeros(9, 40, dtype=torch.int32)
        free = torch.randperm(64).tolist()
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            self.table[row, :length] = torch.tensor([free.pop() for _ in range(length)], dtype=torch.int32)

    def tokens(self, request: int, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.table[self.rows[request], : self.lengths[request]].long()]  # [length, heads, size]


def decode(cache: Cache, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    last = cache.table[cache.rows, cache.lengths - 1]
    out = torch.empty(query.size(0), query.size(1), cache.values.size(-1))
    places = (cache.table, cache.rows, cache.lengths)
    attention.decode_attention(
        query, cache.keys, cache.values, 1.0, 1.0, out, key, value, last, torch.empty(0), *places,
        query.size(-1) ** -0.5, 0.0, False, window, None,
    )  # fmt: skip
    return out


def extend(
    cache: Cache, query: torch.Tensor, new: list[int], window: int = 0, tree: torch.Tensor | None = None
) -> torch.Tensor:
    """New tokens are the last ones of each request; their keys and values are in the cache and given as well."""
    counts = torch.tensor(new)
    starts = counts.cumsum(0) - counts
    fresh = [torch.cat([cache.tokens(i, b)[-n:] for i, n in enumerate(new) if n]) for b in (cache.keys, cache.values)]
    out = torch.empty_like(query)
    attention.extend_attention(
        query, *fresh, out, cache.keys, cache.values, 1.0, 1.0, cache.table, cache.rows, cache.lengths, counts, starts,
        max(new), query.size(-1) ** -0.5, 0.0, False, window, None, None, tree, True,
    )  # fmt: skip
    return out


@pytest.mark.parametrize(("lengths", "window"), [([5, 5], 0), ([1, 9, 4], 0), ([3, 12, 7], 4)])
def test_decoding_writes_the_new_token_and_sees_the_request_or_its_window(lengths: list[int], window: int) -> None:
    cache = Cache(lengths)
    query = torch.randn(len(lengths), 6, 8)  # three query heads share a key head
    key, value = torch.randn(len(lengths), 2, 8), torch.randn(len(lengths), 2, 8)
    out = decode(cache, query, key, value, window)
    for request, length in enumerate(lengths):
        keys, values = cache.tokens(request, cache.keys), cache.tokens(request, cache.values)
        assert torch.equal(keys[-1], key[request]) and torch.equal(values[-1], value[request])
        seen = torch.arange(length)[None] >= (length - window if window else 0)
        for one in range(6):
            expected = plain_attention(query[request, one][None], keys[:, one // 3], values[:, one // 3], seen)
            torch.testing.assert_close(out[request, one].double(), expected[0], atol=1e-6, rtol=0)


def test_decoding_with_values_that_are_part_of_the_keys_reads_them_from_there() -> None:
    cache = Cache([6, 3], heads=1)
    cache.values = cache.keys[..., :5]
    query, key = torch.randn(2, 4, 8), torch.randn(2, 1, 8)
    out = decode(cache, query, key, key[..., :5], window=0)
    for request, length in enumerate([6, 3]):
        keys = cache.tokens(request, cache.keys)[:, 0]
        expected = plain_attention(query[request], keys, keys[:, :5], torch.ones(4, length, dtype=torch.bool))
        torch.testing.assert_close(out[request].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", [0, 3])
def test_new_tokens_see_what_came_before_them(window: int) -> None:
    new, lengths = [4, 0, 1, 3], [4, 6, 5, 9]
    cache = Cache(lengths)
    query = torch.randn(sum(new), 4, 8)
    out, row = extend(cache, query, new, window), 0
    for request, (count, length) in enumerate(zip(new, lengths, strict=True)):
        own = torch.arange(length - count, length)[:, None]
        seen = torch.arange(length)[None] <= own
        if window:
            seen &= torch.arange(length)[None] > own - window
        keys, values = cache.tokens(request, cache.keys), cache.tokens(request, cache.values)
        for one in range(4):
            rows = slice(row, row + count)
            expected = plain_attention(query[rows, one], keys[:, one // 2], values[:, one // 2], seen)
            torch.testing.assert_close(out[rows, one].double(), expected, atol=1e-6, rtol=0)
        row += count


@pytest.mark.parametrize("lengths", [[30] * 8, [1, 9, 4, 30, 30, 2, 17, 8]])
def test_decoding_many_requests_in_bfloat16_is_as_accurate_as_the_plain_version(lengths: list[int]) -> None:
    torch.manual_seed(1)
    shape = (8, 2, 3, 64)
    query, keys, values = (torch.randn(*size).bfloat16() for size in (shape, (8, 2, 30, 64), (8, 2, 30, 64)))
    query *= 3
    hidden = torch.arange(30) >= torch.tensor(lengths)[:, None]
    bias = torch.zeros(8, 1, 1, 30).masked_fill_(hidden[:, None, None], -math.inf)
    scores = query.double() @ keys.double().transpose(-1, -2) * 0.125 + bias
    exact = scores.softmax(-1) @ values.double()
    errors = []
    for attend in (attention._attend, attention._attend_in_two_products):
        out = attend(query, keys, values, bias, 0.125).view(shape)
        errors.append(float((out.double() - exact).abs().mean()))
    rounded = (query @ keys.transpose(-1, -2)).double() * 0.125 + bias  # scores in 8 bits, as one product gives them
    careless = float(((rounded.softmax(-1) @ values.double()).bfloat16().double() - exact).abs().mean())
    assert errors[1] < 1.5 * errors[0] < careless


def test_what_belongs_to_nobody_is_not_even_multiplied_by_zero() -> None:
    cache = Cache([9, 3])
    used = torch.cat([cache.table[cache.rows[0], :9], cache.table[cache.rows[1], :3]]).long()
    unused = torch.ones(64, dtype=torch.bool).index_fill_(0, used, False)
    unused[0] = False  # the slot that SGLang leaves free
    cache.keys[unused], cache.values[unused] = math.nan, math.nan
    cache.table[cache.rows[1], 3:9] = int(unused.nonzero()[0])
    out = decode(cache, torch.randn(2, 2, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8), window=0)
    assert out.isfinite().all()


def test_nodes_of_a_draft_tree_see_the_request_and_their_ancestors() -> None:
    cache = Cache([7, 5])
    chain = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()
    fork = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    query = torch.randn(6, 2, 8)
    out = extend(cache, query, [3, 3], tree=torch.cat([chain.flatten(), fork.flatten()]))
    for request, (length, square) in enumerate([(7, chain), (5, fork)]):
        seen = torch.cat([torch.ones(3, length - 3).bool(), square], dim=1)
        keys, values = cache.tokens(request, cache.keys), cache.tokens(request, cache.values)
        for one in range(2):
            rows = slice(3 * request, 3 * request + 3)
            expected = plain_attention(query[rows, one], keys[:, one], values[:, one], seen)
            torch.testing.assert_close(out[rows, one].double(), expected, atol=1e-6, rtol=0)


def test_what_is_remembered_between_layers_is_computed_anew_after_a_write_in_place() -> None:
    cache = Cache([5, 5])
    query, key, value = torch.randn(2, 2, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    first = decode(cache, query, key, value, window=0)
    cache.table[cache.rows[0], :4] = cache.table[cache.rows[1], :4].clone()
    second = decode(cache, query, key, value, window=0)
    assert not torch.allclose(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_kinds_of_attention_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="no logit capping"):
        attention.decode_attention(
            torch.zeros(1, 1, 8), torch.zeros(2, 1, 8), torch.zeros(2, 1, 8), 1.0, 1.0, *[torch.zeros(1)] * 5,
            *[torch.zeros(1).long()] * 3, 1.0, 30.0, False, 0, None,
        )  # fmt: skip
