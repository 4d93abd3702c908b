"""Real processes that are asked to end, killed, and started again, against a run that nobody disturbed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.tiny import make_tiny_llama

pytestmark = pytest.mark.faults

REPOSITORY = Path(__file__).parents[2]
WAIT_SECONDS = 240.0
NUM_STEPS = 7
CONFIG = """
run: {steps: 7, seed: 3, deterministic: true, phase_deadline_seconds: 120}
model: {policy: model, dtype: float32}
data: {prompts: train.jsonl, apply_chat_template: false, max_prompt_tokens: 64}
modules:
  rollout: {engine: megatron, batch_size: 4, group_size: 4, max_new_tokens: 6}
  rewards: {default: "slow_judge:share_of_digits"}
  training: {learning_rate: 1e-3}
checkpoint: {every_steps: 2, export_at_end: false}
monitor: {tensorboard: false}
"""
JUDGE = """
import time

def share_of_digits(prompt, rollout):
    time.sleep(0.1)  # a step takes long enough to be hit
    return sum(character.isdigit() for character in rollout.text) / max(1, len(rollout.text))
"""


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interruptions")
    make_tiny_llama(folder / "model")
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) for n in range(12)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "slow_judge.py").write_text(JUDGE)
    return folder


def _start(workplace: Path, name: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "NPROC": "2",
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{REPOSITORY}:{workplace}",
    }
    command = ["bash", str(REPOSITORY / "launch_scripts" / "run_local.sh"), "run.yaml", f"run.name={name}"]
    return subprocess.Popen(
        command,
        cwd=workplace,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _steps(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["kind"] == "step"]


def _end(process: subprocess.Popen[str], seen: set[int]) -> tuple[int, str]:
    """Exit code and output; nothing of the job may be left."""
    try:
        output, _ = process.communicate(timeout=WAIT_SECONDS)
    finally:
        left = [pid for pid in seen if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}\n{output}"
    return process.returncode, output


def _disturb(workplace: Path, name: str, after_step: int, act: Callable[[psutil.Process], None]) -> tuple[int, str]:
    """Start the run, wait until the step is done, do something to it, wait for the end."""
    process = _start(workplace, name)
    launcher = psutil.Process(process.pid)
    deadline = time.monotonic() + WAIT_SECONDS
    while not any(step["step"] >= after_step for step in _steps(workplace / "runs" / name)):
        assert process.poll() is None, f"ended early\n{process.communicate()[0]}"
        assert time.monotonic() < deadline, f"step {after_step} was not reached in {WAIT_SECONDS:.0f} s"
        time.sleep(0.02)
    seen = {child.pid for child in launcher.children(recursive=True)}
    act(launcher)
    return _end(process, seen)


def _kill_one_rank(launcher: psutil.Process) -> None:
    ranks = [child for child in launcher.children() if "grpo_megatron.train" in " ".join(child.cmdline())]
    assert len(ranks) == 2, [child.cmdline() for child in launcher.children()]
    ranks[1].kill()


def test_a_run_that_was_asked_to_end_and_then_killed_equals_one_that_was_left_alone(workplace: Path) -> None:
    """SIGTERM: exit code 5, the step is saved. Kill -9 of a rank: 137, the last checkpoint counts. Bit for bit."""
    code, output = _end(_start(workplace, "left-alone"), set())
    assert code == 0, output

    code, output = _disturb(workplace, "disturbed", 1, lambda launcher: launcher.send_signal(signal.SIGTERM))
    assert code == 5, output
    assert "start again to go on" in output

    code, output = _disturb(workplace, "disturbed", 5, _kill_one_rank)
    assert code == 137, output
    assert "resumed from version" in output

    code, output = _end(_start(workplace, "disturbed"), set())
    assert code == 0, output
    assert "resumed from version" in output

    alone, disturbed = (_steps(workplace / "runs" / name) for name in ("left-alone", "disturbed"))
    assert [step["step"] for step in disturbed] == list(range(1, NUM_STEPS + 1))
    for one, other in zip(alone, disturbed, strict=True):
        assert {name for name in one} == {name for name in other}
        for name in one:
            if not name.startswith(("seconds", "speed/", "time")):
                assert one[name] == other[name], (one["step"], name)
