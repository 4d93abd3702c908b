"""The host tier's arithmetic of slabs, on plain memory; that it is pinned shows on a GPU only."""

import pytest
import torch

from grpo_megatron.memory import far
from grpo_megatron.memory.storage_group import StorageGroup
from grpo_megatron.platform.device import current_platform

pytestmark = pytest.mark.unit


def test_tensors_that_cross_slabs_come_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far, "_MAX_SLAB_BYTES", 4096)
    tensors = {str(size): torch.arange(size, dtype=torch.uint8) for size in (1, 255, 4096, 4097, 20_000)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    space = far.HostSpace(current_platform())
    group = StorageGroup("group", tensors.items, platform=current_platform(), space=space)
    for _ in range(2):
        group.move("far")
        assert group.num_device_bytes == 0
        group.move("device")
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_space_that_was_reserved_is_used_again_and_grows_by_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far, "_MAX_SLAB_BYTES", 4096)
    space = far.HostSpace(current_platform())
    space.reserve(5000)
    assert [slab.numel() for slab in space._slabs] == [4096, 1024]
    space.reserve(5000)
    space.reserve(5200)
    assert [slab.numel() for slab in space._slabs] == [4096, 1024, 128]
