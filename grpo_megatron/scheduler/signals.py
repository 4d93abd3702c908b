"""SIGINT and SIGTERM end the run at the next step border, with everything saved; a second one ends it at once."""

import os
import signal
import time
import types

from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.parallel.groups import Groups

REPEAT_SECONDS = 2.0
"""A terminal's Ctrl-C reaches a rank twice, from the terminal and from the launcher."""


class StopRequest:
    """Remembers a signal on this rank; `agreed` makes it everybody's."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._received_seconds = 0.0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: types.FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_seconds = signal.Signals(number).name, now
        elif now - self._received_seconds > REPEAT_SECONDS:
            os._exit(128 + number)  # the user insists: whatever is half written has a temporary name

    def agreed(self, groups: Groups) -> str | None:
        """The signal that any rank has received. Collective over the world."""
        return next((name for name in gather_objects(self.received, groups.world) if name is not None), None)
