"""What all tests need before anything of megatron is imported, and one process group for tests on a single rank."""

from pathlib import Path

import pytest

from grpo_megatron.platform.megatron_on_cpu import install

install()


@pytest.fixture(scope="session")
def single_rank_groups():  # noqa: ANN201
    """Groups of a world of one rank, made once for the whole session."""
    import torch.distributed as dist

    from grpo_megatron.parallel.grid import RankGrid
    from grpo_megatron.parallel.groups import build_groups

    return build_groups(RankGrid(1), backend="gloo", timeout_seconds=60, store=dist.HashStore())


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model with 151 tokens."""
    from tests.tiny import make_tiny_llama

    return make_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))
