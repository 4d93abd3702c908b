"""torchrun with the ranks' own exit code and signals that ask instead of kill.

    python launch_scripts/launch.py [torchrun's options] -m grpo_megatron.train FILE [key.path=value ...]

Takes torchrun's command line as it is and runs torchrun's own agent. Three things differ:
- It ends with the exit code of the rank that failed first, where torchrun always says 1. A rank killed by a signal
  counts as 128 + signal, as in a shell.
- SIGINT, SIGTERM and SIGHUP are passed to every rank of this machine and nothing is killed: a rank finishes its step
  and saves, however long that takes; torchrun would kill it after 30 seconds. A second signal kills.
- No descendant outlives it, reward workers and engines of a killed rank included.
"""

import ctypes
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import psutil

ENDED_EARLY = 5  # the trainer's exit code for: stopped by a signal, everything saved
FAILED = 3
MEETING_SLACK_SECONDS = 15.0
DEFAULT_MEETING_SECONDS = 600.0  # torchrun's own
WRONG_ADDRESS = "check the address, and whether another program holds the port"
REPEAT_SECONDS = 2.0  # a terminal's Ctrl-C may reach us twice, once by the process group and once through the shell
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SET_CHILD_SUBREAPER = 36  # from linux/prctl.h


class SignalForwarder:
    """First signal: ask the ranks to end. A later one: kill them."""

    def __init__(self) -> None:
        self._first_seconds: float | None = None

    def install(self) -> None:
        """Take over the signals that torchrun would answer by killing; those that are ignored (nohup) stay so."""
        for number in FORWARDED_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        ranks = psutil.Process().children()
        if not ranks:
            say(f"{name} before any rank was started")
            sys.exit(ENDED_EARLY)
        if self._first_seconds is None:
            self._first_seconds = time.monotonic()
            say(f"{name}: asking {len(ranks)} ranks to finish their step and save; once more kills them")
            send(ranks, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        elif time.monotonic() - self._first_seconds > REPEAT_SECONDS:
            say(f"{name} again: killing {len(ranks)} ranks")
            send(ranks, signal.SIGKILL)


def exit_code(failures: Mapping[int, Any]) -> int:
    """One exit code for the job, from torchrun's record (`exitcode`, `timestamp`) of every rank that failed.

    When one rank fails, torchrun ends the others by SIGTERM, so that these end early or by that signal: they
    count only where nothing else went wrong.

    Example:
        rank 0 ended early (5) because rank 1 had run out of memory and was killed (-9): 137
    """
    order = sorted(failures, key=lambda rank: (failures[rank].timestamp, rank))
    codes = [failures[rank].exitcode for rank in order]
    causes = [code for code in codes if code not in (ENDED_EARLY, -signal.SIGTERM, 128 + signal.SIGTERM)]
    consequence = ENDED_EARLY if ENDED_EARLY in codes else codes[0]
    chosen = causes[0] if causes else consequence
    return 128 - chosen if chosen < 0 else chosen


def describe(failures: Mapping[int, Any]) -> str:
    """One line that says how each failed rank ended."""
    words = []
    for rank in sorted(failures):
        code = failures[rank].exitcode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words.append(f"rank {rank}: {how} (pid {failures[rank].pid})")
    return ", ".join(words)


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Signal those that are still there."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def adopt_orphans() -> None:
    """Processes whose parent dies become our children, so that `end_descendants` finds them."""
    ctypes.CDLL(None, use_errno=True).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def watch_meeting(seconds: float) -> None:
    """End with one line if no rank is started in time: at a strange port torchrun would wait for ever."""

    def watch() -> None:
        deadline = time.monotonic() + seconds
        while not psutil.Process().children():
            if time.monotonic() > deadline:
                say(f"the machines did not meet within {seconds:.0f} s: {WRONG_ADDRESS}")
                os._exit(FAILED)
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True, name="watch meeting").start()


def meeting_seconds(rendezvous_configuration: str) -> float:
    """How long torchrun waits for the other machines, with time to spare."""
    found = re.search(r"join_timeout=(\d+)", rendezvous_configuration)
    return MEETING_SLACK_SECONDS + (float(found[1]) if found else DEFAULT_MEETING_SECONDS)


def end_descendants(grace_seconds: float = 5.0) -> None:
    """SIGTERM, then SIGKILL, to whatever the ranks left behind."""
    left = psutil.Process().children(recursive=True)
    send(left, signal.SIGTERM)
    _, alive = psutil.wait_procs(left, timeout=grace_seconds)
    send(alive, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=grace_seconds)
    if alive:
        say(f"killed {len(alive)} processes that the ranks had left behind")


def say(message: str) -> None:
    """One line on standard error, so that standard output is the trainer's."""
    print(f"[launch] {message}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run torchrun's agent in this process; returns the exit code of the job."""
    SignalForwarder().install()
    adopt_orphans()
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    # torchrun tells every exit code but 0 in five lines of its own; ours says it in one.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # SIGQUIT stays with torchrun; its list cannot be empty.
    options = torchrun.parse_args(["--signals-to-handle", "SIGQUIT", *arguments])
    watch_meeting(meeting_seconds(options.rdzv_conf))
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        say(describe(error.failures))
        return exit_code(error.failures)
    except RendezvousError as error:
        say(f"the machines did not meet ({error}): {WRONG_ADDRESS}")
        return FAILED
    finally:
        end_descendants()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores; torchrun would set it and warn
    sys.exit(main(sys.argv[1:]))
