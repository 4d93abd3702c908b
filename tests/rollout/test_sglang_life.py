"""Restarts, budget, ports and sleep of a server, on small programs in place of SGLang's."""

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_megatron.rollout.sglang import process as process_module
from grpo_megatron.rollout.sglang.control import Control, EngineFailure
from grpo_megatron.rollout.sglang.life import EngineLife
from grpo_megatron.rollout.sglang.process import EngineProcess, EngineSettings

pytestmark = pytest.mark.faults

HEALTHY = """
import json, socket, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
settings = json.load(sys.stdin)
arguments = settings["arguments"]
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers.get("Authorization") == "Bearer " + arguments["api_key"]
        body = json.dumps({"weight_version": "-1", "environment": dict(__import__("os").environ)}).encode()
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    def log_message(self, *a): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=settings["socket"])
print("serving", flush=True)
server.serve_forever()
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineProcess]:
    """Start a process that runs this program in place of serve.py."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"eos_token_id": 2, "hidden_size": 8}')
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (model / "model.safetensors").write_bytes(b"weights")
    started = []

    def start(program: str, **settings: object) -> EngineProcess:
        file = tmp_path / f"serve-{len(started)}.py"
        file.write_text(program)
        monkeypatch.setattr(process_module, "SERVE", file)
        values = {"deadline_seconds": 20.0, "answer_seconds": 2.0, **settings}
        made = EngineProcess(
            EngineSettings({"model_path": str(model)}, tmp_path / "logs" / "engine-0.log", **values)  # type: ignore[arg-type]
        )
        started.append(made)
        return made

    yield start  # type: ignore[misc]
    for made in started:
        made.kill()


def test_a_server_is_ready_when_it_answers_and_knows_its_token_from_no_command_line(start, tmp_path: Path) -> None:  # noqa: ANN001
    process = start(HEALTHY)
    process.wait_until_ready()
    assert process.token not in Path(f"/proc/{process.process_id}/cmdline").read_text()
    with pytest.raises(EngineFailure, match="status 401"):
        Control(process.address, "wrong", deadline_seconds=5).get("/model_info")
    process.close()
    assert not process.is_running
    assert "serving" in process.log_tail()


def test_the_servers_environment_has_nothing_of_the_launcher_and_no_proxy(start, monkeypatch) -> None:  # noqa: ANN001
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "http_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    process = start(HEALTHY, threads=3, cores=("0,1,2",))
    process.wait_until_ready()  # the call itself uses no proxy either
    environment = process.control.get("/model_info")["environment"]
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "http_proxy", "HTTPS_PROXY"} & set(
        environment
    )
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1,2"


def test_the_engine_sees_the_model_without_end_tokens_of_its_own(start) -> None:  # noqa: ANN001
    process = start(HEALTHY)
    folder = process._folder / "model"
    assert (folder / "config.json").read_text() == '{"eos_token_id": null, "hidden_size": 8}'
    assert not (folder / "generation_config.json").exists()
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    process.kill()
    assert not process._folder.exists()


def test_another_interpreter_runs_the_engine(start, tmp_path: Path) -> None:  # noqa: ANN001
    wrapper = tmp_path / "other-python"
    wrapper.write_text(f'#!/bin/sh\necho "by the other one"\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    process = start(HEALTHY, python=wrapper)
    process.wait_until_ready()
    assert "by the other one" in process.log_tail()


def test_what_a_killed_rank_left_behind_goes_with_the_next_start(start) -> None:  # noqa: ANN001
    import subprocess

    ended = subprocess.Popen(["true"])
    ended.wait()
    left = Path(tempfile.mkdtemp(prefix=f"grpo_megatron-engine-{ended.pid}-"))
    mine = Path(tempfile.mkdtemp(prefix=f"grpo_megatron-engine-{os.getpid()}-"))
    start(HEALTHY)
    assert not left.exists() and mine.exists()
    mine.rmdir()


def test_a_server_that_ends_at_its_start_is_reported_with_the_end_of_its_log(start) -> None:  # noqa: ANN001
    process = start("print('no such model'); raise SystemExit(7)")
    with pytest.raises(EngineFailure, match="exit code 7(.|\n)*engine-0.log(.|\n)*no such model"):
        process.wait_until_ready()


def test_a_server_that_does_not_get_ready_is_given_up_at_the_deadline(start) -> None:  # noqa: ANN001
    process = start("import time; print('thinking', flush=True); time.sleep(60)", deadline_seconds=1.0)
    begin = time.monotonic()
    with pytest.raises(EngineFailure, match="run.start_deadline_seconds(.|\n)*thinking"):
        process.wait_until_ready()
    assert time.monotonic() - begin < 10


def test_a_stopped_server_and_its_children_can_be_killed(start) -> None:  # noqa: ANN001
    process = start("import subprocess; subprocess.Popen(['sleep', '60']); " + HEALTHY.replace("\n", "\n", 1))
    process.wait_until_ready()
    os.killpg(process.process_id, signal.SIGSTOP)
    with pytest.raises(EngineFailure, match="did not answer within 0.5 s"):
        process.control.get("/model_info", deadline_seconds=0.5)
    process.kill()
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.killpg(process.process_id, 0)
            time.sleep(0.05)


def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """The real serve.py asks the kernel for it before anything else."""
    program = f"""
import json, os, subprocess, sys, time
serve = {str(process_module.SERVE)!r}
child = subprocess.Popen([sys.executable, "-c",
    "import sys, json, time; sys.path.insert(0, {str(process_module.SERVE.parent)!r}); import serve, os; "
    "serve.die_with(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(60)", str(os.getpid())],
    stdout=subprocess.PIPE, start_new_session=True)
print(child.stdout.readline().decode().strip(), flush=True)
os.kill(os.getpid(), 9)
"""
    import subprocess

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    child = int(done.stdout)

    def is_alive() -> bool:
        status = Path(f"/proc/{child}/stat")
        return status.exists() and "Z" not in status.read_text().split()[2]

    end = time.monotonic() + 5
    while is_alive() and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(), f"process {child} lives on"


def test_restarts_have_a_budget_and_then_a_clear_end(start) -> None:  # noqa: ANN001
    said: list[str] = []
    life = EngineLife(lambda num_starts: start(HEALTHY), max_restarts=2, say=said.append)
    life.wait_until_ready()
    for number in (1, 2):
        life.version = 5
        os.kill(life.process.process_id, signal.SIGKILL)
        life.process._process.wait()
        life.revive()
        assert life.version == -1 and life.process.is_running
        assert f"restart {number} of 2" in said[-1]
    os.kill(life.process.process_id, signal.SIGKILL)
    with pytest.raises(EngineFailure, match="restarted 2 times already.*modules.rollout.max_engine_restarts"):
        life.restart("it hangs")


def test_a_port_that_another_program_took_costs_a_new_start_and_no_restart(start) -> None:  # noqa: ANN001
    """Case S3. The engine's own port cannot be lost: it is open before the engine starts."""
    programs = ["print('OSError: [Errno 98] Address already in use'); raise SystemExit(1)", HEALTHY]
    said: list[str] = []
    life = EngineLife(lambda num_starts: start(programs[num_starts]), max_restarts=0, say=said.append)
    life.wait_until_ready()
    assert life.num_restarts == 0 and life.num_starts == 2
    assert any("took a port" in text for text in said)


def test_two_servers_never_share_a_port(start) -> None:  # noqa: ANN001
    first, second = start(HEALTHY), start(HEALTHY)
    assert first.address != second.address
    port = int(first.address.rpartition(":")[2])
    with socket.socket() as taker, pytest.raises(OSError, match="in use"):
        taker.bind(("127.0.0.1", port))


def test_a_server_that_does_not_sleep_is_ended_and_another_wakes(start) -> None:  # noqa: ANN001
    said: list[str] = []
    life = EngineLife(lambda num_starts: start(HEALTHY), max_restarts=1, say=said.append)
    life.wait_until_ready()
    life.version = 3
    os.killpg(life.process.process_id, signal.SIGSTOP)
    life.sleep(["kv_cache"])
    assert not life.process.is_running and life.version == -1
    life.wake(["kv_cache"])
    assert life.process.is_running and not life.asleep


def test_only_parts_that_sleep_wake_and_weights_that_slept_are_lost(start) -> None:  # noqa: ANN001
    life = EngineLife(lambda num_starts: start(HEALTHY), max_restarts=0, say=lambda text: None)
    life.wait_until_ready()
    life.version = 3
    life.sleep(["kv_cache"])
    assert (life.asleep, life.version) == ({"kv_cache"}, 3)
    life.sleep(["kv_cache", "weights"])
    assert (life.asleep, life.version) == ({"kv_cache", "weights"}, -1)
    life.wake(["weights"])
    assert life.asleep == {"kv_cache"}
