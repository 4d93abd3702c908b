"""Waiting without a collective: deadlines that name who is missing, and failures that end the wait."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from grpo_megatron.parallel.errors import RankFailure
from grpo_megatron.parallel.store import SharedStore

pytestmark = pytest.mark.unit


@pytest.fixture
def two_ranks() -> tuple[SharedStore, SharedStore]:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    first, second = (SharedStore(store, rank=rank, world_size=2) for rank in range(2))
    return first, second


def test_a_wait_that_is_too_long_names_the_ranks_that_are_missing(two_ranks: tuple[SharedStore, SharedStore]) -> None:
    with pytest.raises(TimeoutError, match=r"end of step 3: ranks \[1\] did not arrive within 0 s"):
        two_ranks[0].meet("step-3", what="end of step 3", deadline_seconds=0.1)


def test_a_rank_that_failed_is_not_waited_for(two_ranks: tuple[SharedStore, SharedStore]) -> None:
    begin = time.monotonic()
    two_ranks[1].fail("step-3", "the engine died")
    with pytest.raises(RankFailure, match="end of step 3: rank 1: the engine died"):
        two_ranks[0].meet("step-3", what="end of step 3", deadline_seconds=30.0)
    assert time.monotonic() - begin < 5.0


def test_ranks_that_are_all_there_go_on(two_ranks: tuple[SharedStore, SharedStore]) -> None:
    two_ranks[1].add("step-3/count", 1)
    two_ranks[0].meet("step-3", what="end of step 3", deadline_seconds=1.0)


def test_a_key_that_nobody_sets_is_named(two_ranks: tuple[SharedStore, SharedStore]) -> None:
    with pytest.raises(TimeoutError, match="address: not set within 0 s"):
        two_ranks[0].get("address", deadline_seconds=0.1)
    two_ranks[1].set("address", "here")
    assert two_ranks[0].get("address", deadline_seconds=1.0) == "here"
