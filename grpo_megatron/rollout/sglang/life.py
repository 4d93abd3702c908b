"""The life of one SGLang server: started, restarted within a budget, put to sleep and woken, and what it serves."""

import re
from collections.abc import Callable, Sequence

from grpo_megatron.rollout.base import NO_VERSION, EnginePart
from grpo_megatron.rollout.sglang.control import Control, EngineFailure
from grpo_megatron.rollout.sglang.process import EngineProcess

MAX_PORT_ATTEMPTS = 3
_PORT_TAKEN = re.compile("address already in use|EADDRINUSE", re.IGNORECASE)


class EngineLife:
    """On the leader of the engine's group.

    Args:
        start: makes the server's process; the number of earlier starts is its argument.
        say: told that a start takes its time.
        warn: told of every loss and restart; default: `say`.
        frees_memory: whether what sleeps is gone.
    """

    def __init__(
        self,
        start: Callable[[int], EngineProcess],
        *,
        max_restarts: int,
        say: Callable[[str], None],
        warn: Callable[[str], None] | None = None,
        frees_memory: bool = True,
    ) -> None:
        self._start = start
        self._max_restarts = max_restarts
        self._say, self._warn = say, warn or say
        self._frees_memory = frees_memory
        self._asleep: set[EnginePart] = set()
        self.num_starts = 0
        self.num_restarts = 0
        self.version = NO_VERSION
        """What the server serves; NO_VERSION while it has no whole version."""
        self.is_paused = False
        self.process = self._begin()

    @property
    def control(self) -> Control:
        """Of the process that runs now: ask again after a restart."""
        return self.process.control

    @property
    def asleep(self) -> frozenset[EnginePart]:
        return frozenset(self._asleep)

    def wait_until_ready(self) -> None:
        """A port that SGLang chose for itself may be taken before it opens it: then it is started anew.

        Raises:
            EngineFailure: after the process was ended.
        """
        for attempt in range(1, MAX_PORT_ATTEMPTS + 1):
            try:
                self.process.wait_until_ready(lambda seconds: self._say(f"SGLang is starting ({seconds:.0f} s)"))
                return
            except EngineFailure as failure:
                self.process.kill()
                if attempt == MAX_PORT_ATTEMPTS or not _PORT_TAKEN.search(str(failure)):
                    raise
                self._warn("another program took a port that SGLang had chosen: starting it anew")
                self.process = self._begin()

    def restart(self, reason: str) -> None:
        """Kill what is left and start anew; the new server has no version until the next publish.

        Raises:
            EngineFailure: the budget of restarts is used up, or the server does not start.
        """
        self._replace(reason)
        self.wait_until_ready()

    def revive(self) -> None:
        """Restart the server if it is gone or does not answer; awake afterwards. Raises EngineFailure."""
        try:
            self.control.get("/model_info")
        except EngineFailure as failure:
            self.restart(str(failure))

    def set_version(self, version: int) -> None:
        """Stamp what is sampled from now on, without a publish."""
        self.control.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self.serves(version)

    def serves(self, version: int) -> None:
        """The server says that this is its version now."""
        self.version = version

    def read_version(self) -> int:
        """As the server says it. Raises EngineFailure."""
        return int(self.control.get("/model_info")["weight_version"])

    def pause(self) -> None:
        """Stop sampling; what runs waits without its cache, so that weights may change and the cache be flushed."""
        self.control.post("/pause_generation", {"mode": "retract"})
        self.is_paused = True

    def resume(self) -> None:
        """Go on with what waits; its cache is computed anew, by the weights of now."""
        self.control.post("/continue_generation", {})
        self.is_paused = False

    def sleep(self, parts: Sequence[EnginePart]) -> None:
        """Give their memory back. Weights that slept come back with the next publish, the cache is made anew.

        A server that does not do it is killed, so that its memory is free in any case; `wake` starts another.
        """
        falling = sorted(set(parts) - self._asleep)
        if not falling or not self.process.is_running:
            return
        try:
            self.control.post("/release_memory_occupation", {"tags": falling})
            self._asleep |= set(falling)
            if "weights" in falling and self._frees_memory:
                self.version = NO_VERSION
        except EngineFailure as failure:
            self._warn(f"the engine does not sleep and is ended: {failure}")
            self.version = NO_VERSION
            self.process.kill()

    def wake(self, parts: Sequence[EnginePart]) -> None:
        """Raises EngineFailure: no server can be started in place of one that does not wake."""
        try:
            rising = sorted(set(parts) & self._asleep)
            if not self.process.is_running:
                raise EngineFailure("its process has ended")
            if rising:
                self.control.post("/resume_memory_occupation", {"tags": rising})
                self._asleep -= set(rising)
        except EngineFailure as failure:
            self.restart(str(failure))

    def close(self) -> None:
        self.process.close()

    def _replace(self, reason: str) -> None:
        tail = self.process.log_tail()
        self.process.kill()
        if self.num_restarts >= self._max_restarts:
            raise EngineFailure(
                f"the engine was lost ({reason}) and has been restarted {self._max_restarts} times already "
                f"(modules.rollout.max_engine_restarts)\n{tail}"
            )
        self.num_restarts += 1
        self._warn(f"the engine was lost ({reason}): restart {self.num_restarts} of {self._max_restarts}\n{tail}")
        self.process = self._begin()

    def _begin(self) -> EngineProcess:
        process = self._start(self.num_starts)
        self.num_starts += 1
        self.version = NO_VERSION
        self._asleep.clear()
        self.is_paused = False
        return process
