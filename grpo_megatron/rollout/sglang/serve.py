"""The engine's own process: SGLang's server on a socket that the rank has opened. Run as `python -P serve.py`.

Reads its settings as one JSON object from standard input, so that the token is on no command line: `arguments` (fields
of SGLang's ServerArgs), `socket` (an inherited listening socket), `path` (folders to look for modules in after all
others), `parent` (the rank's process id), `fork` (whether SGLang's other processes may be forked). Imports nothing of
this project: the interpreter may be another one.
"""

import ctypes
import functools
import json
import os
import signal
import socket
import sys


def main() -> None:
    """Serve until the rank or SGLang ends it."""
    settings = json.load(sys.stdin)
    die_with(settings["parent"])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    sys.path.extend(settings["path"])
    serve_on(socket.socket(fileno=settings["socket"]))

    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if settings["fork"]:
        fork_schedulers()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    try:
        run_server(ServerArgs(**settings["arguments"]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the rank dies, however it dies; SGLang's schedulers do so with us."""
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, linux/prctl.h
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(f"the rank with process id {parent} is gone")


def serve_on(listening: socket.socket) -> None:
    """SGLang hands uvicorn a port number; this one is open already, so that nobody can take it in between."""
    import uvicorn

    uvicorn.Server.run = functools.partialmethod(uvicorn.Server.run, sockets=[listening])  # type: ignore[method-assign]


def fork_schedulers() -> None:
    """On a CPU: SGLang's schedulers and detokenizer come from this process, which has imported everything already.

    SGLang spawns them, since a process that uses CUDA cannot be forked; each spawned one imports for 10 s of CPU time.
    """
    import multiprocessing

    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401 the model files

    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: choose("fork", force=force)


if __name__ == "__main__":  # SGLang's schedulers import this file again
    main()
