"""One worker process seen from the trainer: start, one question and answer at a time, hard kill."""

import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo_megatron.batch import RewardResult
from grpo_megatron.platform.environment import clean_child_environment
from grpo_megatron.rewards.values import describe_error

_PACKAGE_PARENT = Path(__file__).resolve().parents[2]
_MAX_REPLY_BYTES = 1 << 20
_TRANSFER_SECONDS = 30
_KILL_SECONDS = 10.0


class WorkerRefused(ValueError):
    """The worker started and said why it cannot score: the user's module does not import, for instance."""


class WorkerProcess:
    """A worker in a session of its own, so that killing it takes along what it started.

    Started and used by one thread that lives as long as the worker: the kernel ties the parent-death signal to it.
    """

    def __init__(self, names: Sequence[str], *, start_deadline_seconds: float) -> None:
        """Start the worker and wait until it can score.

        Raises:
            WorkerRefused: it cannot build one of the rewards.
            TimeoutError: it was not ready in time.
            RuntimeError: it died on the way.
        """
        ours, theirs = socket.socketpair()
        # A worker that was stopped reads and writes nothing: without limits it would block its thread for ever.
        limit = struct.pack("ll", _TRANSFER_SECONDS, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo_megatron.rewards.worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                env=_worker_environment(),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints is for the reader, and never mixes with the trainer's own output
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        try:
            self._await_ready(names, start_deadline_seconds)
        except BaseException:
            if self._process.returncode is None:
                self.kill()
            raise

    @property
    def process_id(self) -> int:
        return self._process.pid

    def score(self, sequence: int, request: bytes, timeout_seconds: float) -> tuple[RewardResult, bool]:
        """Ask for one score. The second value says whether the worker can go on; if not, it has been killed."""
        started = time.monotonic()
        try:
            self._connection.send_bytes(request)
            remaining = timeout_seconds - (time.monotonic() - started)
            if not self._connection.poll(max(0.0, remaining)):
                self.kill()
                late = describe_error("timeout", f"no score within {timeout_seconds:g} s")
                return RewardResult(None, error=late), False
            reply = json.loads(self._connection.recv_bytes(_MAX_REPLY_BYTES))
        except (EOFError, OSError, ValueError) as error:
            code = self.kill()
            what = f"the worker ended with code {code} while it scored ({type(error).__name__})"
            return RewardResult(None, error=describe_error("died", what)), False
        assert reply["sequence"] == sequence, f"worker answered {reply['sequence']} when asked {sequence}"
        return RewardResult(reply["score"], reply["parts"], reply["error"]), True

    def interrupt(self) -> None:
        """Kill the process from another thread; the owner sees the connection end and cleans up."""
        self._process.kill()

    def kill(self) -> int | None:
        """Kill the worker and what it started, and reap it. Returns its exit code, its own if it died by itself."""
        self._connection.close()
        # Not reaped yet, so the process id still names this worker and its group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)
        return self._process.returncode

    def _await_ready(self, names: Sequence[str], deadline_seconds: float) -> None:
        try:
            self._connection.send_bytes(pickle.dumps(tuple(names)))
            if not self._connection.poll(deadline_seconds):
                raise TimeoutError(f"a reward worker was not ready within {deadline_seconds:g} s")
            reply: dict[str, Any] = json.loads(self._connection.recv_bytes(_MAX_REPLY_BYTES))
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"a reward worker ended with code {self.kill()} before it was ready") from error
        if "refused" in reply:
            raise WorkerRefused(reply["refused"])


def _worker_environment() -> dict[str, str]:
    environment = clean_child_environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_PACKAGE_PARENT), environment.get("PYTHONPATH", ""))))
    environment["OMP_NUM_THREADS"] = environment["OPENBLAS_NUM_THREADS"] = "1"
    return environment
