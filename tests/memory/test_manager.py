"""The manager over a real policy: what a phase does not need is gone, and training does not notice."""

from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from grpo_megatron.checkpoint.base import OneProcess
from tests.building import build_tiny_policy
from tests.checkpoint.policies import TinyPolicy, assert_same_bits
from tests.memory.phases import CHECKPOINT, make_manager, run_steps

pytestmark = pytest.mark.numerics


def large_storages(*owners: Any) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """Every storage above a KiB that can be reached from the owners: attributes, items, parameters, hooks' closures."""
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [(type(owner).__name__, owner) for owner in owners]
    while todo:
        path, value = todo.pop()
        if id(value) in seen or isinstance(value, str | bytes | int | float | type):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.untyped_storage().nbytes() > 1024:
                yield path, value.untyped_storage()
            todo += [(f"{path}.{name}", getattr(value, name, None)) for name in ("main_grad", "grad", "main_param")]
        elif isinstance(value, dict):
            todo += [(f"{path}[{key if isinstance(key, str) else type(key).__name__}]", v) for key, v in value.items()]
            todo += [(f"{path} key", key) for key in value if isinstance(key, torch.Tensor)]
        elif isinstance(value, list | tuple | set):
            todo += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        elif type(value).__module__.startswith(("megatron", "torch.nn", "torch.optim", "grpo_megatron")):
            todo += [(f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_with_everything_moved_equals_training_with_nothing_moved(
    dtype, tiny_llama, single_rank_groups, tmp_path
) -> None:  # noqa: ANN001
    histories, tables = [], []
    for offload in ("never", "always"):
        policy = TinyPolicy(tiny_llama, single_rank_groups, dtype=dtype)
        manager = make_manager(policy, tmp_path, offload=offload)
        histories.append(run_steps(policy, manager, range(4)))
        tables.append(policy.tensors())
        manager.close()
    assert histories[0] == histories[1]
    assert_same_bits(tables[0], tables[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_phase_does_not_need_has_no_memory(dtype, tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    """Case M5: whatever the wrapper and the optimizer hold, under whatever name, is in a group and has moved."""
    policy = TinyPolicy(tiny_llama, single_rank_groups, dtype=dtype)
    policy.train(range(1))
    owners = (policy.trainer.wrapped, policy.trainer.optimizer)
    assert len(dict(large_storages(*owners))) > 50
    manager = make_manager(policy, tmp_path, offload="always")
    manager.enter("nothing")
    left = [path for path, _ in large_storages(*owners) if "rotary" not in path]
    assert left == []
    manager.enter("rollout")
    weights = {parameter.untyped_storage()._cdata for parameter in policy.chunks[0].parameters()}
    on_device = {storage._cdata for path, storage in large_storages(*owners) if "rotary" not in path}
    assert on_device == weights


def test_reports_count_the_bytes_of_a_hand_computed_model(tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    """bfloat16 policy of n numbers in buffers padded to m: weights 2m, gradients 4m, masters 4n, moments 8n."""
    policy = TinyPolicy(tiny_llama, single_rank_groups, dtype="bfloat16")
    policy.train(range(1))
    numbers = sum(parameter.numel() for parameter in policy.chunks[0].parameters())
    padded = sum(buffer.numel for buffer in policy.trainer.wrapped[0].buffers)
    assert numbers == 151 * 64 + 64 + 4 * (2 * 64 + 128 * 64 + 64 * 64 + 192 * 64 + 96 * 64) and padded >= numbers
    manager = make_manager(policy, tmp_path, offload="always")
    away = manager.enter("nothing")
    assert (away.bytes_in, away.bytes_out, away.bytes_discarded) == (0, 2 * padded + 12 * numbers, 4 * padded)
    update = manager.enter("update")
    assert (update.bytes_in, update.bytes_out) == (6 * padded + 12 * numbers, 0)
    again = manager.enter("update")
    assert (again.bytes_in, again.moves) == (0, ())


def test_a_hundred_cycles_of_a_policy_grow_nothing(tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    """Case M4."""
    policy = TinyPolicy(tiny_llama, single_rank_groups, dtype="bfloat16")
    policy.train(range(1))
    before = policy.tensors()
    manager = make_manager(policy, tmp_path, offload="always")
    process = psutil.Process()
    for _ in range(3):
        manager.enter("nothing")
        manager.enter("update")
    memory, descriptors = process.memory_info().rss, process.num_fds()
    for _ in range(100):
        manager.enter("nothing")
        manager.enter("update")
    assert process.num_fds() == descriptors
    assert process.memory_info().rss - memory < 4 << 20
    assert_same_bits(policy.tensors(), before)


def test_a_save_from_the_middle_of_the_cycle_holds_everything(tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    """Case M7: what a checkpoint reads comes back first."""
    policy = TinyPolicy(tiny_llama, single_rank_groups, dtype="bfloat16")
    policy.train(range(2))
    saved = policy.tensors()
    manager = make_manager(policy, tmp_path / "far", offload="always")
    manager.enter("rollout")
    (tmp_path / "model").mkdir()
    with pytest.raises(AssertionError, match="off the device: enter the checkpoint phase"):
        policy.state.save(tmp_path / "model", OneProcess())
    manager.require("checkpoint", CHECKPOINT)
    policy.state.save(tmp_path / "model", OneProcess())
    resumed = TinyPolicy(tiny_llama, single_rank_groups, dtype="bfloat16")
    resumed.state.load(tmp_path / "model")
    assert_same_bits(resumed.tensors(), saved)


def test_the_reference_is_there_for_scoring_only(tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    policy = TinyPolicy(tiny_llama, single_rank_groups)
    reference = build_tiny_policy(tiny_llama, single_rank_groups)
    wanted = {name: parameter.detach().clone() for name, parameter in reference[0].named_parameters()}
    manager = make_manager(policy, tmp_path, offload="always", reference=reference)
    manager.enter("update")
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in reference[0].parameters())
    manager.enter("score")
    assert_same_bits({name: parameter.detach() for name, parameter in reference[0].named_parameters()}, wanted)


def test_two_groups_over_one_memory_are_refused(tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    policy = TinyPolicy(tiny_llama, single_rank_groups)
    manager = make_manager(policy, tmp_path, offload="always", reference=policy.chunks)
    with pytest.raises(AssertionError, match="groups policy_parameters and reference_parameters share memory"):
        manager.enter("update")


def test_a_phase_that_is_not_in_the_table_is_refused(tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    manager = make_manager(TinyPolicy(tiny_llama, single_rank_groups), tmp_path, offload="never")
    with pytest.raises(AssertionError, match="phase dance is not in the table"):
        manager.enter("dance")
