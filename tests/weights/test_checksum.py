"""The checksum notices what a faulty transfer does to a tensor."""

import pytest
import torch

from grpo_megatron.weights.checksum import checksum

pytestmark = pytest.mark.unit


def _numbers(dtype: torch.dtype = torch.bfloat16, count: int = 70001) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_equal_tensors_have_equal_checksums_wherever_they_start_in_memory() -> None:
    numbers = _numbers()
    shifted = torch.cat([torch.zeros(3, dtype=torch.bfloat16), numbers])[3:]
    assert checksum(shifted) == checksum(numbers) == checksum(numbers.clone())
    assert checksum(numbers.view(1, -1)[0]) == checksum(numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("index", [0, 3, 65536 * 4 - 1, 70000, 262150, -1])
def test_one_flipped_bit_changes_it_at_any_place(dtype: torch.dtype, index: int) -> None:
    numbers = _numbers(dtype, 300001)
    flipped = numbers.clone()
    flipped[index] = -flipped[index]  # the sign alone: the top bit of a word at some of these places
    assert checksum(flipped) != checksum(numbers)


@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 4), (3, 7), (0, 65536 * 4), (100, 200000)])
def test_swapped_values_change_it(first: int, second: int) -> None:
    """Order counts inside a word, between words and between chunks; values that differ in their sign only as well."""
    numbers = _numbers(count=300001)
    numbers[first], numbers[second] = 1.5, -1.5
    swapped = numbers.clone()
    swapped[first], swapped[second] = -1.5, 1.5
    assert checksum(swapped) != checksum(numbers)


def test_rows_in_another_order_change_it() -> None:
    numbers = _numbers(count=64 * 128).view(64, 128)
    assert len({checksum(numbers), checksum(numbers.flip(0)), checksum(numbers.roll(1, 0))}) == 3


def test_dtype_and_shape_count() -> None:
    zeros = [
        torch.zeros(16, dtype=torch.bfloat16),
        torch.zeros(16, dtype=torch.float16),
        torch.zeros(8, dtype=torch.float32),
        torch.zeros(4, 4, dtype=torch.bfloat16),
        torch.zeros(17, dtype=torch.bfloat16),
        torch.zeros(0),
        torch.tensor(0.0),
    ]
    assert len({checksum(each) for each in zeros}) == len(zeros)


def test_the_value_is_the_same_in_every_process_and_version() -> None:
    """Recorded; a change of the definition would make sender and receiver of different versions disagree."""
    assert checksum(torch.arange(5, dtype=torch.bfloat16)) == 4055956051893493641
    assert 0 <= checksum(_numbers()) < 2**63
