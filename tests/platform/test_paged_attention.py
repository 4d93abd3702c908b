"""Paged attention in torch against plain softmax attention, one token after another, in float64."""

import pytest
import torch

from grpo_megatron.platform.paged_attention import PagedStep, PromptRun, paged_attention

pytestmark = pytest.mark.unit
HEADS, QUERY_HEADS, CHANNELS, BLOCK = 2, 6, 8, 4
LENGTHS = (1, 4, 5, 11)
"""Of the sequences; the first two decode, of the others the whole prompt is computed."""


def _expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """One query [query heads, channels] over [positions, heads, channels]; three query heads read one head each."""
    rows = []
    for head in range(QUERY_HEADS):
        own = head * HEADS // QUERY_HEADS
        weights = torch.softmax((keys[:, own].double() @ query[head].double()) * scale, dim=0)
        rows.append(weights @ values[:, own].double())
    return torch.stack(rows)


def _gather_rows(tables: list[list[int]]) -> torch.Tensor:
    return torch.tensor([block * HEADS + head for table in tables for head in range(HEADS) for block in table])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_rows_and_prompts_attend_to_their_own_past_only(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tables = [[7, 0], [3, 0], [5, 2], [1, 8, 6]]  # block 0 pads
    sequences = [
        (torch.randn(n, HEADS, CHANNELS).to(dtype), torch.randn(n, HEADS, CHANNELS).to(dtype)) for n in LENGTHS
    ]
    key_cache = torch.full((10, HEADS, BLOCK, CHANNELS), 100.0).to(dtype)  # what must stay masked is loud
    value_cache = key_cache.clone()
    for table, (keys, values) in zip(tables, sequences, strict=True):
        for position in range(len(keys)):
            block, offset = table[position // BLOCK], position % BLOCK
            key_cache[block, :, offset], value_cache[block, :, offset] = keys[position], values[position]
    query = torch.randn(1 + 1 + 5 + 11 + 2, QUERY_HEADS, CHANNELS).to(dtype)
    bias = torch.zeros(2, 1, 1, 8)
    for row, length in enumerate(LENGTHS[:2]):
        bias[row, ..., length:] = float("-inf")
    step = PagedStep(
        num_decode=2,
        decode_gather=_gather_rows(tables[:2]),
        decode_bias=bias,
        prompts=(PromptRun(2, 1, 5, _gather_rows([tables[2]])), PromptRun(7, 1, 11, _gather_rows([tables[3]]))),
    )
    output = paged_attention(query, key_cache, value_cache, step, 0.5)
    queries = [(0, 0), (1, 1), *((2 + place, 2) for place in range(5)), *((7 + place, 3) for place in range(11))]
    for place, sequence in queries:
        keys, values = sequences[sequence]
        seen = len(keys) if sequence < 2 else place - (2, 7)[sequence - 2] + 1
        expected = _expected(query[place], keys[:seen], values[:seen], 0.5)
        torch.testing.assert_close(
            output[place].double(), expected, atol=1e-6 if dtype == torch.float32 else 0.03, rtol=0
        )
    assert (output[18:] == 0).all()  # padding


def test_prompts_of_equal_length_are_computed_together() -> None:
    torch.manual_seed(1)
    key_cache, value_cache = torch.randn(2, 6, HEADS, BLOCK, CHANNELS)
    query = torch.randn(12, QUERY_HEADS, CHANNELS)
    none = torch.zeros(0, dtype=torch.int64)
    together = PagedStep(0, none, torch.zeros(0, 1, 1, 0), (PromptRun(0, 2, 6, _gather_rows([[4, 1], [2, 5]])),))
    apart = PagedStep(
        0, none, torch.zeros(0, 1, 1, 0),
        (PromptRun(0, 1, 6, _gather_rows([[4, 1]])), PromptRun(6, 1, 6, _gather_rows([[2, 5]]))),
    )  # fmt: skip
    torch.testing.assert_close(
        paged_attention(query, key_cache, value_cache, together, 0.3),
        paged_attention(query, key_cache, value_cache, apart, 0.3),
    )
