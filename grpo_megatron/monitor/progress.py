"""Progress of long work inside a phase: a bar on a terminal, a plain line every few seconds elsewhere."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Protocol, Self, TextIO

from grpo_megatron.monitor.console import duration_text

ProgressKind = Literal["auto", "bar", "lines", "silent"]
SECONDS_BETWEEN_LINES = 5.0


class Progress(Protocol):
    """Counts work that is done; used as a context manager."""

    def advance(self, amount: int = 1) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_progress(
    description: str,
    *,
    total: int | None,
    unit: str,
    kind: ProgressKind = "auto",
    stream: TextIO | None = None,
    say: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Progress:
    """Return progress to advance by hand: `with open_progress("rollout", total=128, unit="answers") as progress`.

    Args:
        total: None if it is not known.
        kind: `auto` is a bar if the stream is a terminal, else lines; `silent` is for all ranks but one.
        stream: where a bar goes; standard error if None.
        say: how a plain line is written, as the logger's `info`; to the stream if None.
    """
    stream = sys.stderr if stream is None else stream
    if kind == "silent":
        return _Silent()
    if kind == "bar" or (kind == "auto" and stream.isatty()):
        return _Bar(description, total, unit, stream)
    return _Lines(description, total, unit, say or (lambda line: print(line, file=stream, flush=True)), clock)


class _Silent:
    def advance(self, amount: int = 1) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class _Bar(_Silent):
    """tqdm; it disappears when the work is done, since the step's line says the rest."""

    def __init__(self, description: str, total: int | None, unit: str, stream: TextIO) -> None:
        # Imported late: off a terminal nobody needs it.
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # else tqdm starts a thread of its own
        self._bar = tqdm(
            desc=description, total=total, unit=f" {unit}", file=stream, leave=False, dynamic_ncols=True, smoothing=0.1
        )

    def advance(self, amount: int = 1) -> None:
        self._bar.update(amount)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


class _Lines(_Silent):
    """`rollout: 64/128 answers (50%), 12.8 answers/s, 0:05 left`; work that is done before the first line is silent."""

    def __init__(
        self,
        description: str,
        total: int | None,
        unit: str,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._description = description
        self._total = total
        self._unit = unit
        self._say = say
        self._clock = clock
        self._done = 0
        self._start = self._last_line = clock()
        self._said_something = False

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        if self._clock() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._write()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._said_something:
            self._write()

    def _write(self) -> None:
        now = self._clock()
        self._last_line, self._said_something = now, True
        rate = self._done / max(now - self._start, 1e-9)
        if self._total is None:
            self._say(f"{self._description}: {self._done} {self._unit}, {rate:.1f} {self._unit}/s")
            return
        share = self._done / self._total if self._total else 1.0
        left = max(0, self._total - self._done)
        end = f", {duration_text(left / rate)} left" if left and rate else f", {duration_text(now - self._start)}"
        self._say(
            f"{self._description}: {self._done}/{self._total} {self._unit} ({share:.0%}), "
            f"{rate:.1f} {self._unit}/s{end}"
        )
