"""A reward worker: one process that scores one rollout at a time. Started by `pool.py`, never by hand.

Requests come pickled over a socket whose descriptor is the first argument; answers go back as JSON, so that nothing a
reward returns is ever unpickled by the trainer. A hung worker is killed from outside, hence no time-outs in here.
"""

import contextlib
import ctypes
import json
import os
import pickle
import resource
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from grpo_megatron.batch import Prompt, RewardResult, Rollout
from grpo_megatron.rewards.base import Reward
from grpo_megatron.rewards.build import build_reward
from grpo_megatron.rewards.values import BadValue, UnparsableInput, describe_error, to_result

MAX_MEMORY_BYTES = 8 << 30
"""Of private memory; a symbolic computation that explodes ends in a MemoryError and not in the trainer's death."""
_PR_SET_PDEATHSIG = 1
_PARENT_POLL_SECONDS = 1.0


def main() -> None:
    """Answer requests until the pool closes the connection or its process is gone."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with_parent(parent)
    _be_a_good_neighbour()
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    names: tuple[str, ...] = pickle.loads(connection.recv_bytes())
    rewards: dict[str, Reward] = {}
    for name in names:
        try:
            rewards[name] = build_reward(name)
        except BaseException as error:  # a user's module may also exit on import
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            _send(connection, {"refused": f"reward {name!r}: {reason}"})
            return
    _send(connection, {"ready": True})
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            sequence, prompt, rollout = pickle.loads(connection.recv_bytes())
            result = score_one(rewards[prompt.reward.name], prompt, rollout)
            reply = {"sequence": sequence, "score": result.score, "parts": dict(result.parts), "error": result.error}
            _send(connection, reply)


def score_one(reward: Reward, prompt: Prompt, rollout: Rollout) -> RewardResult:
    """Score, with whatever goes wrong as a counted error."""
    try:
        return to_result(reward.score(prompt, rollout))
    except UnparsableInput as error:
        return RewardResult(None, error=describe_error("unparsable", str(error)))
    except BadValue as error:
        return RewardResult(None, error=describe_error("bad_value", str(error)))
    except BaseException as error:  # SystemExit and MemoryError as well: the worker must live on
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
        return RewardResult(None, error=describe_error("exception", f"{type(error).__name__}: {error}{place}"))


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _die_with_parent(parent: int) -> None:
    """By signal at once; by a thread that looks, should the kernel's signal be tied to a thread that lives on."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the signal was asked for
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent watch").start()


def _be_a_good_neighbour() -> None:
    """Bound the memory, offer ourselves first when the machine runs out of it, leave Ctrl-C to the trainer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


if __name__ == "__main__":
    main()
