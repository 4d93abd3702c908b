"""Saving and loading on several ranks: in the same layout bit by bit, in another layout tensor by tensor."""

import resource
from pathlib import Path

import torch
from megatron.core import dist_checkpointing

from grpo_megatron.checkpoint.base import CheckpointError
from grpo_megatron.checkpoint.checkpointer import Checkpointer, RunState, open_checkpointer
from grpo_megatron.checkpoint.coordination import WorldCoordination
from grpo_megatron.checkpoint.random_state import RandomState
from grpo_megatron.trainer.optimizer import inner_optimizers
from tests.checkpoint.policies import TinyPolicy, assert_same_bits
from tests.checkpoint.stores import DESCRIPTION, names
from tests.distributed.harness import CaseContext, case
from tests.tiny import make_tiny_llama

VOCABULARY = 151


def _model_folder(context: CaseContext, seed: int) -> Path:
    folder = context.shared_folder / f"checkpoint-llama-{seed}"
    if context.rank == 0 and not folder.exists():
        make_tiny_llama(folder, seed=seed)
    torch.distributed.barrier()
    return folder


def _policy(context: CaseContext, *, seed: int = 0, dtype: str = "bfloat16", **layout: int) -> TinyPolicy:
    return TinyPolicy(_model_folder(context, seed), context.groups(**layout), dtype=dtype)


def _open(policy: TinyPolicy, folder: Path, keep: int = 1) -> Checkpointer:
    return open_checkpointer(folder, keep=keep, coordination=WorldCoordination(policy.groups))


def _run_state() -> RunState:
    return RunState(per_rank={"random": RandomState()})


def _whole_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by name, as it is without any sharding, rows of padding cut off."""
    plain = dist_checkpointing.load_plain_tensors(str(folder / "model"))
    table = {name: value for name, value in plain.items() if isinstance(value, torch.Tensor)}
    return {n: value[:VOCABULARY] if "word_embeddings" in n else value for n, value in table.items()}


def _steps(policy: TinyPolicy) -> set[float]:
    (optimizer,) = inner_optimizers(policy.trainer.optimizer)
    return {float(state["step"]) for state in optimizer.state.values()}


def _check_resharding(context: CaseContext, *layouts: dict[str, int]) -> None:
    """Through all layouts in turn: what the last one saves is what the first one saved."""
    policy = _policy(context, **layouts[0])
    policy.train(range(2))
    checkpointer = _open(policy, context.folder / "0")
    original = checkpointer.save(1, policy.state, _run_state(), DESCRIPTION).checkpoint.path
    checkpointer.close()
    expected = _whole_tensors(original)
    assert len(expected) == 4 * 8  # weights, masters and two moments of: 6 tensors over all layers, embedding, norm
    source = original.parent
    for index, layout in enumerate(layouts[1:], start=1):
        other = _policy(context, seed=7, **layout)
        checkpointer = _open(other, source)
        report = checkpointer.load(None, other.state, _run_state())
        checkpointer.close()
        assert report is not None and _steps(other) == {2.0}
        source = context.folder / str(index)
        checkpointer = _open(other, source)
        saved = checkpointer.save(1, other.state, _run_state(), DESCRIPTION).checkpoint.path
        checkpointer.close()
        assert_same_bits(_whole_tensors(saved), expected)


@case(world_size=2)
def data_parallel_to_tensor_and_pipeline_parallel_and_back(context: CaseContext) -> None:
    """The vocabulary of 151 is padded to 152 rows under tensor parallelism, and the padding stays out of it."""
    _check_resharding(context, {}, {"tensor": 2}, {"pipeline": 2}, {})


@case(world_size=4)
def tensor_and_pipeline_parallel_to_data_parallel_and_back(context: CaseContext) -> None:
    _check_resharding(context, {"tensor": 2, "pipeline": 2}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 4})


def _check_resume(context: CaseContext, **layout: int) -> None:
    policy = _policy(context, **layout)
    policy.train(range(2))
    folder = context.folder / "checkpoints"
    checkpointer = _open(policy, folder)
    checkpointer.save(2, policy.state, _run_state(), DESCRIPTION)
    saved = policy.tensors()
    undisturbed, number = policy.train(range(2, 5)), torch.rand(())
    checkpointer.close()

    resumed = _policy(context, seed=7, **layout)
    checkpointer = _open(resumed, folder)
    report = checkpointer.load(None, resumed.state, _run_state())
    assert report is not None and report.per_rank_state.per_rank == "restored"
    assert_same_bits(resumed.tensors(), saved)
    assert resumed.train(range(2, 5)) == undisturbed and torch.rand(()) == number
    assert_same_bits(resumed.tensors(), policy.tensors())
    checkpointer.close()


@case(world_size=2)
def resumed_training_equals_undisturbed_training_on_two_replicas(context: CaseContext) -> None:
    _check_resume(context)


@case(world_size=2)
def resumed_training_equals_undisturbed_training_under_tensor_parallelism(context: CaseContext) -> None:
    _check_resume(context, tensor=2)


@case(world_size=2)
def resumed_training_equals_undisturbed_training_under_pipeline_parallelism(context: CaseContext) -> None:
    """The tied embedding has a bucket of its own on both stages, with padding between it and the rest."""
    _check_resume(context, pipeline=2)


@case(world_size=2)
def the_optimizer_may_be_gathered_on_the_first_rank_only(context: CaseContext) -> None:
    """The same contents, whichever way they were put together."""
    from dataclasses import replace

    policy = _policy(context)
    policy.train(range(1))
    folders = []
    for gather in ("every_rank", "first_rank"):
        checkpointer = _open(policy, context.folder / gather)
        state = replace(policy.state, gather_optimizer=gather)
        folders.append(checkpointer.save(1, state, _run_state(), DESCRIPTION).checkpoint.path)
        checkpointer.close()
    assert_same_bits(_whole_tensors(folders[0]), _whole_tensors(folders[1]))


@case(world_size=2)
def a_rank_that_cannot_write_fails_the_save_on_all_and_the_next_save_works(context: CaseContext) -> None:
    """Case C6 on one rank of two: neither a hang nor half a checkpoint, and the older one is untouched."""
    policy = _policy(context)
    checkpointer = _open(policy, context.folder / "checkpoints")
    checkpointer.save(1, policy.state, _run_state(), DESCRIPTION)
    policy.train(range(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for failing in (0, 1):
        if context.rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            checkpointer.save(2, policy.state, _run_state(), DESCRIPTION)
            raise AssertionError("the save went through")
        except CheckpointError as error:
            message = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert f"rank {failing}: " in message and "no space in" in message and "bytes) free" in message, message
        torch.distributed.barrier()
        assert names(context.folder / "checkpoints") == ["version-000001"]
        torch.distributed.barrier()
    checkpointer.save(2, policy.state, _run_state(), DESCRIPTION)
    assert names(context.folder / "checkpoints") == ["version-000002"]
    checkpointer.close()


@case(world_size=2)
def damage_that_one_rank_finds_is_known_to_all(context: CaseContext) -> None:
    """Case C2: each rank checks a share of the files; all of them go to the version before."""
    policy = _policy(context)
    checkpointer = _open(policy, context.folder / "checkpoints", keep=3)
    for version in (1, 2):
        checkpointer.save(version, policy.state, _run_state(), DESCRIPTION)
        policy.train(range(version))
    if context.rank == 0:
        file = max((context.folder / "checkpoints/version-000002/model").glob("*.distcp"))
        with file.open("r+b") as stream:
            stream.seek(file.stat().st_size // 2)
            stream.write(b"damage")
    torch.distributed.barrier()
    report = checkpointer.load(None, policy.state, _run_state())
    assert report is not None and report.checkpoint.version == 1
    assert len(report.skipped) == 1 and "is damaged" in report.skipped[0].reason
    checkpointer.close()


@case(world_size=2)
def a_second_job_is_refused_on_all_its_ranks(context: CaseContext) -> None:
    policy = _policy(context)
    first = _open(policy, context.folder / "checkpoints")
    try:
        _open(policy, context.folder / "checkpoints")
        raise AssertionError("two jobs on one folder")
    except CheckpointError as error:
        assert "in use by another job" in str(error)
    first.close()
    torch.distributed.barrier()
    _open(policy, context.folder / "checkpoints").close()
