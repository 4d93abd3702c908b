"""Real launches of a fake trainer: exit codes come through, a signal asks, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 90.0


@dataclass
class Launch:
    """A launch under way, and the pids that its ranks wrote down."""

    process: subprocess.Popen
    folder: Path

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not all((self.folder / f"ready-{rank}").exists() for rank in (0, 1)):
            assert self.process.poll() is None and time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)

    def finish(self) -> int:
        return self.process.wait(timeout=DEADLINE_SECONDS)

    def left_behind(self) -> list[int]:
        """Ranks and their children that are still alive."""
        written = [*self.folder.glob("ready-*"), *self.folder.glob("orphan-*")]
        assert len(written) == 4, "the ranks did not get far enough to say anything"
        return [pid for pid in (int(path.read_text()) for path in written) if psutil.pid_exists(pid)]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Start `run_local.sh` with two ranks of the fake trainer; what is still there at the end is killed."""
    started: list[Launch] = []

    def start(behaviour: str, script: str = "run_local.sh", **variables: str) -> Launch:
        environment = os.environ | {"PYTHON": sys.executable, "NPROC": "2"} | variables
        environment |= {"TRAINER": "tests.repository.fake_trainer"}
        command = ["bash", f"launch_scripts/{script}", str(tmp_path), behaviour]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
        started.append(Launch(process, tmp_path))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
            one.finish()


def test_the_failing_rank_decides_the_exit_code_and_its_children_are_ended(launch) -> None:  # noqa: ANN001
    one = launch("rank_1_fails")
    assert one.finish() == 3
    assert one.left_behind() == []


def test_a_refusal_of_all_ranks_comes_through_the_launcher_for_several_machines(launch) -> None:  # noqa: ANN001
    one = launch("refused", "run_torchrun.sh", NNODES="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    assert one.finish() == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_lets_every_rank_finish_and_save(launch, number: signal.Signals) -> None:  # noqa: ANN001
    one = launch("waits")
    one.wait_until_ready()
    one.process.send_signal(number)
    assert one.finish() == 5
    assert [(one.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == [number.name] * 2
    assert one.left_behind() == []


def test_a_second_signal_kills_ranks_that_do_not_end(launch) -> None:  # noqa: ANN001
    one = launch("never_ends")
    one.wait_until_ready()
    one.process.send_signal(signal.SIGTERM)
    time.sleep(2.5)
    assert one.process.poll() is None, "one signal must not kill"
    one.process.send_signal(signal.SIGTERM)
    assert one.finish() == 128 + signal.SIGKILL
    assert one.left_behind() == []
