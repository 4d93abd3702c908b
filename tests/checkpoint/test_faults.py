"""Processes killed and disks that refuse, while a checkpoint is being saved. What was saved before always loads."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_megatron.checkpoint.base import CheckpointError, OneProcess
from grpo_megatron.checkpoint.checkpointer import Checkpointer, RunState, open_checkpointer
from grpo_megatron.checkpoint.random_state import RandomState
from grpo_megatron.trainer.optimizer import inner_optimizers
from tests.checkpoint.policies import TinyPolicy, assert_same_bits
from tests.checkpoint.stores import DESCRIPTION, names
from tests.checkpoint.test_checkpointer import TextModel, make_checkpointer, state

pytestmark = pytest.mark.faults
ROOT = Path(__file__).parents[2]
DISK_CALLS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.listdir", "os.scandir"}


def save_and_die(folder: Path, at_call: int) -> int:
    """In a child: save version 2 over 1 with keep = 1, killed before its n-th call to the disk. Returns its status."""
    child = os.fork()
    if child == 0:
        count = 0

        def die_at_call(event: str, arguments: tuple) -> None:
            nonlocal count
            if event in DISK_CALLS:
                count += 1
                if count == at_call:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            checkpointer = make_checkpointer(folder, keep=1)
            sys.addaudithook(die_at_call)
            checkpointer.save(2, TextModel("weights 2"), state(2), DESCRIPTION)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_save_killed_before_any_of_its_disk_calls_leaves_one_whole_version(tmp_path: Path) -> None:
    """Case C1, at every point there is: version 1 or version 2 loads, and the next start leaves no rubbish."""
    versions = []
    for at_call in range(1, 500):
        folder = tmp_path / str(at_call)
        checkpointer = make_checkpointer(folder, keep=1)
        checkpointer.save(1, TextModel("weights 1"), state(1), DESCRIPTION)
        checkpointer.close()
        status = save_and_die(folder, at_call)
        checkpointer, model, run_state = make_checkpointer(folder, keep=1), TextModel(""), state(None)
        report = checkpointer.load(None, model, run_state)
        assert report is not None, at_call
        version = report.checkpoint.version
        assert model.weights == f"weights {version}" and run_state.shared["step"].state == version
        assert not [name for name in names(folder) if not name.startswith("version-")]
        checkpointer.close()
        versions.append(version)
        if os.WIFEXITED(status):
            break
    assert len(versions) > 30 and versions == sorted(versions) and set(versions) == {1, 2}


def test_a_training_process_killed_while_it_writes_tensors_goes_on_from_the_version_before(
    tiny_llama, single_rank_groups, tmp_path
) -> None:  # noqa: ANN001
    """Case C1 with a real model: keep = 1, kill -9 while tensors are being written."""
    folder = tmp_path / "checkpoints"
    command = [sys.executable, "-m", "tests.checkpoint.save_until_killed", str(tiny_llama), str(folder)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    try:
        assert [process.stdout.readline() for _ in range(3)] == ["saved 1\n", "saved 2\n", "writing 3\n"]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert [path.stat().st_size > 0 for path in folder.glob(".tmp-version-000003-*/model/*.distcp")] == [True]
    policy = TinyPolicy(tiny_llama, single_rank_groups, dtype="bfloat16")
    checkpointer = open_checkpointer(folder, keep=1, coordination=OneProcess())
    report = checkpointer.load(None, policy.state, RunState(per_rank={"random": RandomState()}))
    checkpointer.close()
    assert report is not None and report.checkpoint.version == 2 and report.skipped == ()
    (optimizer,) = inner_optimizers(policy.trainer.optimizer)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    undisturbed = TinyPolicy(tiny_llama, single_rank_groups, dtype="bfloat16")
    undisturbed.train(range(2))
    assert_same_bits(policy.tensors(), undisturbed.tensors())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"this user may not mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


class FillsTheDisk:
    """A real model; while it is being saved something else fills the disk."""

    def __init__(self, policy: TinyPolicy) -> None:
        self._state = policy.state

    def num_bytes(self) -> int:
        return self._state.num_bytes()

    def load(self, folder: Path) -> None:
        self._state.load(folder)

    def save(self, folder: Path, coordination: OneProcess) -> None:
        with contextlib.suppress(OSError), (folder.parents[1] / "ballast").open("wb") as stream:
            while True:
                stream.write(bytes(1 << 18))
        self._state.save(folder, coordination)


def test_a_disk_that_fills_up_during_a_save_is_named_with_its_free_bytes(
    tiny_llama, single_rank_groups, small_disk
) -> None:  # noqa: ANN001
    """Case C6: the old version stays, the space of the attempt is free again, and saving works once there is room."""
    policy = TinyPolicy(tiny_llama, single_rank_groups, dtype="bfloat16")
    checkpointer = open_checkpointer(small_disk / "checkpoints", keep=2, coordination=OneProcess())
    checkpointer.save(1, policy.state, RunState(), DESCRIPTION)
    with pytest.raises(CheckpointError, match=r"no space in /.*: .*0\.\d+ GB \(\d+ bytes\) free. Free some, lower"):
        checkpointer.save(2, FillsTheDisk(policy), RunState(), DESCRIPTION)
    assert names(small_disk / "checkpoints") == ["ballast", "version-000001"]
    (small_disk / "checkpoints" / "ballast").unlink()
    checkpointer.save(2, policy.state, RunState(), DESCRIPTION)
    assert names(small_disk / "checkpoints") == ["version-000001", "version-000002"]


def test_a_save_that_cannot_fit_is_refused_before_it_starts(small_disk: Path) -> None:
    checkpointer = make_checkpointer(small_disk / "checkpoints")
    needed = r"0\.057 GB \(56777216 bytes\) needed"  # 40 MB and 16 MiB to spare
    with pytest.raises(CheckpointError, match=rf"no space in .*: {needed}, 0\.03\d GB \(\d+ bytes\) free"):
        checkpointer.save(1, TextModel("w" * 40_000_000), state(1), DESCRIPTION)
    assert names(small_disk / "checkpoints") == []


def test_a_folder_that_became_read_only_is_named_and_the_old_version_still_loads(small_disk: Path) -> None:
    """Case C6."""
    checkpointer = make_checkpointer(small_disk / "checkpoints")
    checkpointer.save(1, TextModel("weights 1"), state(1), DESCRIPTION)
    # A second mount of the same, since the first one holds the lock file open for writing.
    subprocess.run(["mount", "--bind", str(small_disk), str(small_disk)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(small_disk)], check=True)
    try:
        message = r"version-000002-\w+ cannot be written \(Read-only file system\). Make it writable or choose another"
        with pytest.raises(CheckpointError, match=message):
            checkpointer.save(2, TextModel("weights 2"), state(2), DESCRIPTION)
        model = TextModel("")
        assert checkpointer.load(None, model, state(None)) is not None and model.weights == "weights 1"
        with pytest.raises(CheckpointError, match=r"opening the checkpoint folder: .*Read-only file system"):
            make_checkpointer(small_disk / "new")
    finally:
        subprocess.run(["umount", str(small_disk)], check=True)


def test_a_limit_on_file_size_during_a_real_save_is_a_clear_error(tiny_llama, single_rank_groups, tmp_path) -> None:  # noqa: ANN001
    """The same path as a full disk, for users who may not mount; torch's serialiser hides the reason from us."""
    policy = TinyPolicy(tiny_llama, single_rank_groups, dtype="bfloat16")
    checkpointer: Checkpointer = open_checkpointer(tmp_path, keep=1, coordination=OneProcess())
    checkpointer.save(1, policy.state, RunState(), DESCRIPTION)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"saving tensors failed: writing: no space in /.* bytes\) free"):
            checkpointer.save(2, policy.state, RunState(), DESCRIPTION)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(tmp_path) == ["version-000001"]
    assert checkpointer.load(None, policy.state, RunState()) is not None
