"""Where the seconds of a step go: nested spans that account for all of it. Knows no device and no process group."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

OTHER = "other"
"""What lies in the step and in no phase."""


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of one step.

    Example:
        >>> times = StepSeconds(10.0, {"rollout": 6.0, "update": 3.5, "other": 0.5}, {"update/optimizer": 1.0})
        >>> sum(times.phases.values()) == times.total
        True
    """

    total: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Outermost spans in order of their first start, then `other`; they sum to `total`."""
    nested: Mapping[str, float] = field(default_factory=dict)
    """Spans inside phases by path, `update/optimizer`; each is part of the one that it lies in."""


class PhaseTimer:
    """Times spans of the main thread; a span of the same name adds to the earlier one."""

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, synchronize: Callable[[], None] | None = None
    ) -> None:
        """Start the first step.

        Args:
            clock: seconds, never going back.
            synchronize: waits for the device, called where an outermost span begins and ends, so that work which is
                only queued counts for the phase that queued it.
        """
        self._clock = clock
        self._synchronize = synchronize
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._step_start = clock()

    @property
    def current(self) -> str:
        """Path of the innermost open span; empty outside of all."""
        return "/".join(self._open)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what runs inside, also if it raises."""
        assert name and "/" not in name, f"span name {name!r}"
        assert self._open or name != OTHER, f"{OTHER!r} is what is left between the phases"
        start = self._now(outermost=not self._open)
        self._open.append(name)
        path = self.current
        self._seconds.setdefault(path, 0.0)
        try:
            yield
        finally:
            self._seconds[path] += self._now(outermost=len(self._open) == 1) - start
            self._open.pop()

    def finish_step(self) -> StepSeconds:
        """Return the seconds since the last call (or the beginning) and start the next step."""
        assert not self._open, f"step ended inside of {self.current}"
        now = self._clock()
        total = now - self._step_start
        phases = {path: seconds for path, seconds in self._seconds.items() if "/" not in path}
        # Spans of one thread cannot overlap; rounding alone may leave a negative rest.
        phases[OTHER] = max(0.0, total - math.fsum(phases.values()))
        nested = {path: seconds for path, seconds in self._seconds.items() if "/" in path}
        self._seconds = {}
        self._step_start = now
        return StepSeconds(total, phases, nested)

    def _now(self, *, outermost: bool) -> float:
        if outermost and self._synchronize is not None:
            self._synchronize()
        return self._clock()
