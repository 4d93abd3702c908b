"""One SGLang server as a process of its own: start, log, deadline, and an end that leaves nothing behind."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.platform.environment import clean_child_environment
from grpo_megatron.rollout.sglang.control import Control, EngineFailure

SERVE = Path(__file__).with_name("serve.py")
CPU_KERNELS = Path(__file__).with_name("cpu_kernels")
REPOSITORY = Path(__file__).resolve().parents[3]
_FOLDER = "grpo_megatron-engine-"
_LOG_LINES = 15
_POLL_SECONDS = 0.2
_END_SECONDS = 10.0
"""How long a server may take to end by itself before it is killed."""
_HEARTBEAT_SECONDS = 15.0


@dataclass(frozen=True)
class EngineSettings:
    """What an engine's process is started with.

    Example:
        >>> EngineSettings({"model_path": "/model"}, Path("logs/engine-0.log")).threads
        1
    """

    arguments: Mapping[str, Any]
    """Fields of SGLang's ServerArgs; address and key are added at the start."""
    log_file: Path
    python: Path = Path(sys.executable)
    on_cpu: bool = True
    threads: int = 1
    """CPU threads of each of its tensor-parallel ranks."""
    cores: tuple[str, ...] = ("0",)
    """On a CPU: for each of those ranks, the cores that kernels with threads of their own take: `2,3`."""
    deadline_seconds: float = 600.0
    """Of the start."""
    answer_seconds: float = 120.0
    """Of every single answer to a control call."""


class EngineProcess:
    """A running server. `start` in the main thread: the kernel kills the server when the thread ends that made it."""

    def __init__(self, settings: EngineSettings) -> None:
        """Start the process; `wait_until_ready` says when it can be used."""
        self._settings = settings
        _remove_folders_of_the_dead()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
        token = secrets.token_hex(32)
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
            port = listening.getsockname()[1]
            self.address = f"http://127.0.0.1:{port}"
            self._process = self._popen(listening)
            arguments = {
                **settings.arguments,
                "model_path": str(_view_of_model(Path(settings.arguments["model_path"]), self._folder / "model")),
                "host": "127.0.0.1",
                "port": port,
                "api_key": token,
            }
            self._send_settings(arguments, listening)
        self.token = token
        self.control = Control(
            self.address, token, deadline_seconds=settings.answer_seconds, is_running=lambda: self.is_running
        )

    @property
    def process_id(self) -> int:
        """Of the server; it leads a session of its own, with its schedulers in it."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, waiting: Callable[[float], None] = lambda seconds: None) -> None:
        """Wait until the server has generated a token.

        Args:
            waiting: called now and then with the seconds so far.

        Raises:
            EngineFailure: the process ended, or the deadline is over; with the last lines of its log.
        """
        begin = heard = time.monotonic()
        deadline = self._settings.deadline_seconds
        while time.monotonic() < begin + deadline:
            if not self.is_running:
                raise EngineFailure(f"SGLang ended at its start with {self._describe_end()}\n{self.log_tail()}")
            with contextlib.suppress(EngineFailure):
                self.control.get("/model_info", deadline_seconds=2.0)  # answered once the schedulers are up
                self.control.get("/health_generate", deadline_seconds=30.0)
                return
            if time.monotonic() > heard + _HEARTBEAT_SECONDS:
                heard = time.monotonic()
                waiting(heard - begin)
            time.sleep(_POLL_SECONDS)
        raise EngineFailure(
            f"SGLang was not ready within {deadline:.0f} s (run.start_deadline_seconds)\n{self.log_tail()}"
        )

    def log_tail(self) -> str:
        """The last lines of its log, for an error message."""
        with contextlib.suppress(OSError):
            lines = self._settings.log_file.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            return "\n".join([f"the end of {self._settings.log_file}:", *(f"  {line}" for line in lines)])
        return f"its log {self._settings.log_file} cannot be read"

    def kill(self) -> None:
        """End the server and its schedulers at once, also when they are stopped or hang."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process_id, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Ask the server to end, and kill what is left of it."""
        if self.is_running:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        self.kill()

    def _popen(self, listening: socket.socket) -> "subprocess.Popen[bytes]":
        settings = self._settings
        environment = clean_child_environment() | {
            "OMP_NUM_THREADS": str(settings.threads),
            "TMPDIR": str(self._folder),  # SGLang leaves socket files behind when it is killed
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if settings.on_cpu:
            environment |= {
                "SGLANG_USE_CPU_ENGINE": "1",
                "SGLANG_PLUGINS": "grpo_megatron_sglang_cpu",
                "SGLANG_CPU_OMP_THREADS_BIND": "|".join(settings.cores),
                "TORCHDYNAMO_DISABLE": "1",  # torch.compile would call a C++ compiler for minutes
            }
        settings.log_file.parent.mkdir(parents=True, exist_ok=True)
        with settings.log_file.open("ab") as log:
            return subprocess.Popen(
                [str(settings.python), "-P", str(SERVE)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[listening.fileno()],
                start_new_session=True,  # what SGLang kills cannot reach the rank, and a signal to the rank not it
            )

    def _send_settings(self, arguments: Mapping[str, Any], listening: socket.socket) -> None:
        path = [str(REPOSITORY)] + ([str(CPU_KERNELS)] if self._settings.on_cpu else [])
        settings = {
            "arguments": arguments,
            "socket": listening.fileno(),
            "path": path,
            "parent": os.getpid(),
            "fork": self._settings.on_cpu,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its log says why
            self._process.stdin.write(json.dumps(settings).encode())
            self._process.stdin.close()

    def _describe_end(self) -> str:
        code = self._process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _remove_folders_of_the_dead() -> None:
    """A rank that is killed cannot clear up after its engine."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        owner = folder.name.removeprefix(_FOLDER).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _view_of_model(source: Path, target: Path) -> Path:
    """The model's folder without its own end tokens: an answer ends at the tokens that a request names, at no others.

    SGLang stops at those of config.json and generation_config.json whatever a request says.
    """
    target.mkdir()
    for file in source.resolve().iterdir():
        if file.name == "config.json":
            config = json.loads(file.read_text())
            (target / file.name).write_text(json.dumps({**config, "eos_token_id": None}))
        elif file.name != "generation_config.json":
            (target / file.name).symlink_to(file)
    return target
