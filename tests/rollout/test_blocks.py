"""Handing out, sharing and taking back blocks of the cache."""

import pytest

from grpo_megatron.rollout.megatron.blocks import BlockPool

pytestmark = pytest.mark.unit


def test_blocks_are_handed_out_once_until_they_come_back() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2), pool.take(1)
    assert sorted(first + second) == [0, 1, 2]
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 are free"):
        pool.take(1)
    pool.release(first)
    assert sorted(pool.take(2)) == sorted(first)


def test_a_shared_block_is_free_only_after_its_last_reader() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2


def test_releasing_twice_is_an_error_of_ours() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(blocks)
