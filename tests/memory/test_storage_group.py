"""Groups over real tensors on the CPU tier: the memory really goes, and the same bytes come back."""

import os
import resource
from pathlib import Path

import psutil
import pytest
import torch

from grpo_megatron.memory.far import FileSpace
from grpo_megatron.memory.storage_group import StorageGroup
from grpo_megatron.platform.device import current_platform

pytestmark = pytest.mark.unit
MEBIBYTE = 1 << 20


def make_group(tensors: dict[str, torch.Tensor], folder: Path, **settings) -> StorageGroup:  # noqa: ANN003
    return StorageGroup("group", tensors.items, platform=current_platform(), space=FileSpace(folder), **settings)


def test_the_same_bytes_come_back_to_everything_that_pointed_to_them(tmp_path: Path) -> None:
    flat = torch.randn(1000)
    tensors = {"flat": flat, "view": flat[10:20].view(2, 5), "half": torch.randn(300, dtype=torch.bfloat16)}
    tied = tensors["view"].t()  # somebody else's view, not in the group
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    group = make_group(tensors, tmp_path)
    assert group.num_bytes == 4000 + 600
    group.move("far")
    assert group.tier == "far"
    assert group.num_bytes == 4600 and group.num_device_bytes == 0
    assert flat.untyped_storage().nbytes() == 0
    group.move("device")
    assert group.num_device_bytes == 4600
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    assert torch.equal(tied, before["view"].t())
    tensors["view"].fill_(7.0)
    assert torch.all(flat[10:20] == 7.0) and torch.all(tied == 7.0)


def test_nan_payloads_and_negative_zero_survive(tmp_path: Path) -> None:
    words = torch.tensor([0x7FC01234, -(2**31), 0x7F800001], dtype=torch.int32)
    values = words.clone().view(torch.float32)
    group = make_group({"values": values}, tmp_path)
    group.move("far")
    group.move("device")
    assert torch.equal(values.view(torch.int32), words)


def test_resident_memory_of_the_process_falls_and_rises(tmp_path: Path) -> None:
    """Small tensors too, which glibc would keep for itself."""
    tensors = {"large": torch.ones(24 * MEBIBYTE)} | {str(i): torch.ones(16384) for i in range(512)}  # 96 + 32 MiB
    group = make_group(tensors, tmp_path)
    process = psutil.Process()
    full = process.memory_info().rss
    group.move("far")
    fallen = full - process.memory_info().rss
    assert fallen > 0.9 * 128 * MEBIBYTE, fallen / MEBIBYTE
    group.move("device")
    assert abs(process.memory_info().rss - full) < 16 * MEBIBYTE


def test_a_hundred_cycles_keep_the_bytes_and_need_no_more_memory_or_file_descriptors(tmp_path: Path) -> None:
    """Case M4."""
    tensors = {str(i): torch.randn(1 + 777 * i) for i in range(64)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    group = make_group(tensors, tmp_path)
    process = psutil.Process()
    for _ in range(3):
        group.move("far")
        group.move("device")
    memory, descriptors = process.memory_info().rss, process.num_fds()
    for _ in range(100):
        group.move("far")
        group.move("device")
    assert process.num_fds() == descriptors
    assert process.memory_info().rss - memory < 4 * MEBIBYTE
    assert group.num_device_bytes == sum(tensor.numel() * 4 for tensor in tensors.values())
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_discarded_tensors_come_back_as_zeros() -> None:
    gradients = torch.randn(100)
    group = StorageGroup("gradients", {"g": gradients}.items, platform=current_platform(), space=None)
    assert group.away == "discarded"
    group.move("discarded")
    assert gradients.untyped_storage().nbytes() == 0
    group.move("device")
    assert torch.equal(gradients, torch.zeros(100))


def test_tensors_that_appear_and_disappear_between_moves_are_followed(tmp_path: Path) -> None:
    """Adam makes its moments at the first step; a loaded state may replace them."""
    tensors: dict[str, torch.Tensor] = {}
    group = make_group(tensors, tmp_path)
    group.move("far")
    group.move("device")
    tensors["first"] = torch.arange(5.0)
    group.move("far")
    dropped = tensors.pop("first")
    tensors["second"] = torch.arange(6.0)
    group.move("far")
    group.move("device")
    assert torch.equal(tensors["second"], torch.arange(6.0))
    assert dropped.untyped_storage().nbytes() == 0
    assert group.num_bytes == 24


def test_constant_tensors_are_written_once(tmp_path: Path) -> None:
    weights = torch.randn(1000)
    before = weights.clone()
    space = FileSpace(tmp_path)
    written: list[int] = []
    original = space.write
    space.write = lambda source, offset: (written.append(source.numel()), original(source, offset))  # type: ignore
    group = StorageGroup(
        "reference", {"w": weights}.items, platform=current_platform(), space=space, contents="constant"
    )
    for _ in range(3):
        group.move("far")
        group.move("device")
    assert written == [4000]
    assert torch.equal(weights, before)


def test_a_tensor_that_was_left_behind_fails_the_move(tmp_path: Path) -> None:
    """The walk after the move asks the owner again."""
    tensors = {"a": torch.ones(10)}
    group = make_group(tensors, tmp_path)
    asked = iter([tensors, tensors | {"late": torch.ones(3)}])
    group._tensors = lambda: next(asked).items()
    with pytest.raises(AssertionError, match="group: late is on the wrong side of far"):
        group.move("far")


def test_memory_that_belongs_to_someone_else_is_refused_by_name(tmp_path: Path) -> None:
    borrowed = torch.from_numpy(__import__("numpy").ones(10))
    with pytest.raises(AssertionError, match="the memory of borrowed belongs to someone else"):
        make_group({"borrowed": borrowed}, tmp_path).move("far")
    assert torch.equal(borrowed, torch.ones(10, dtype=torch.float64))


def test_a_far_folder_without_room_is_an_error_before_anything_left(tmp_path: Path) -> None:
    """Case C6 for offloading: RLIMIT_FSIZE stands in for a full disk."""
    tensors = {"a": torch.arange(MEBIBYTE, dtype=torch.float32)}
    group = make_group(tensors, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEBIBYTE, before[1]))
    try:
        with pytest.raises(OSError, match=r"memory_management.far_folder: .* no room for 4194304 bytes"):
            group.move("far")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(tensors["a"], torch.arange(MEBIBYTE, dtype=torch.float32))
    group.move("far")
    group.move("device")
    assert torch.equal(tensors["a"], torch.arange(MEBIBYTE, dtype=torch.float32))


def test_nothing_is_left_in_the_far_folder(tmp_path: Path) -> None:
    """Not even when the process is killed: the file has no name from the start."""
    group = make_group({"a": torch.ones(10)}, tmp_path)
    group.move("far")
    assert os.listdir(tmp_path) == []
    group.move("device")
    group.close()
