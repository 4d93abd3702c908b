"""Training with everything moved off the device between phases is training, bit by bit, on every layout."""

from pathlib import Path

import torch

from grpo_megatron.checkpoint.checkpointer import RunState, open_checkpointer
from grpo_megatron.checkpoint.coordination import WorldCoordination
from tests.checkpoint.policies import TinyPolicy, assert_same_bits
from tests.checkpoint.stores import DESCRIPTION
from tests.distributed.harness import CaseContext, case
from tests.memory.phases import CHECKPOINT, make_manager, run_steps
from tests.tiny import make_tiny_llama


def _model_folder(context: CaseContext) -> Path:
    folder = context.shared_folder / "memory-llama"
    if context.rank == 0 and not folder.exists():
        make_tiny_llama(folder)
    torch.distributed.barrier()
    return folder


def _check(context: CaseContext, *, dtype: str = "bfloat16", **layout: int) -> None:
    """Never and always from the same start; then a resume in between, from a save made while things were away."""
    folder = _model_folder(context)
    histories, tables = [], []
    for offload in ("never", "always"):
        policy = TinyPolicy(folder, context.groups(**layout), dtype=dtype)
        manager = make_manager(policy, context.folder / "far", offload=offload)
        histories.append(run_steps(policy, manager, range(4)))
        tables.append(policy.tensors())
        manager.close()
    assert histories[0] == histories[1]
    assert_same_bits(tables[0], tables[1])


@case(world_size=2)
def always_equals_never_on_two_replicas(context: CaseContext) -> None:
    _check(context)


@case(world_size=2)
def always_equals_never_under_tensor_parallelism(context: CaseContext) -> None:
    _check(context, tensor=2)
    _check(context, tensor=2, dtype="float32")


@case(world_size=2)
def always_equals_never_under_pipeline_parallelism(context: CaseContext) -> None:
    """The tied embedding lies on both stages, in a bucket of its own."""
    _check(context, pipeline=2)


@case(world_size=2)
def a_run_that_was_saved_while_offloaded_resumes_bit_by_bit(context: CaseContext) -> None:
    """Case M7 on two replicas, resumed in another offload policy."""
    folder, store = _model_folder(context), context.folder / "checkpoints"
    policy = TinyPolicy(folder, context.groups(), dtype="bfloat16")
    manager = make_manager(policy, context.folder / "far", offload="always")
    run_steps(policy, manager, range(2))
    manager.enter("rollout")
    manager.require("checkpoint", CHECKPOINT)
    checkpointer = open_checkpointer(store, keep=1, coordination=WorldCoordination(policy.groups))
    checkpointer.save(2, policy.state, RunState(), DESCRIPTION)
    expected = run_steps(policy, manager, range(2, 4))

    resumed = TinyPolicy(folder, policy.groups, dtype="bfloat16")
    assert checkpointer.load(None, resumed.state, RunState()) is not None
    checkpointer.close()
    other = make_manager(resumed, context.folder / "far", offload="never")
    assert run_steps(resumed, other, range(2, 4)) == expected
    assert_same_bits(resumed.tensors(), policy.tensors())
