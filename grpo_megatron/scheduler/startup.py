"""Ordered start-up: named stages, each timed, each with its name in every error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class StartError(RuntimeError):
    """A stage of the start failed; the message names the stage and the cause."""


@dataclass
class Startup:
    """Collects how long each stage took; `say` gets one line when a stage begins to matter."""

    say: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one stage.

        Raises:
            StartError: from whatever failed inside.
        """
        begin = time.monotonic()
        try:
            yield
        except (ValueError, OSError, RuntimeError) as error:
            raise StartError(f"start, stage '{name}': {error}") from error
        self.seconds[name] = time.monotonic() - begin
        self.say(f"start: {name} ({self.seconds[name]:.1f} s)")
