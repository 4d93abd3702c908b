"""Ordered start-up: named stages, each timed, each with its name in every error, and all ranks in step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from grpo_megatron.parallel.collectives import gather_objects
from grpo_megatron.parallel.groups import Groups


class StartError(RuntimeError):
    """A stage of the start failed on some rank; the message names the stage, the ranks and the cause."""


@dataclass
class Startup:
    """Runs the stages of a start and remembers how long each took."""

    say: Callable[[str], None]
    seconds: dict[str, float] = field(default_factory=dict)
    groups: Groups | None = None
    """None before the ranks have met."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one stage; afterwards all ranks have passed it or none goes on. Collective over the world.

        Raises:
            StartError: on every rank, if the stage failed on any.
        """
        begin = time.monotonic()
        error = None
        try:
            yield
        except Exception as failure:  # whatever it is, the other ranks wait for the outcome of the stage
            expected = isinstance(failure, ValueError | OSError | RuntimeError)
            error = str(failure) if expected and str(failure) else f"{type(failure).__name__}: {failure}"
            if self.groups is None:
                raise StartError(f"start, {name}: {error}") from failure
            cause: BaseException | None = failure
        else:
            cause = None
        if self.groups is not None:
            self._agree(name, error, cause)
        self.seconds[name] = time.monotonic() - begin
        self.say(f"start: {name} ({self.seconds[name]:.1f} s)")

    def _agree(self, name: str, error: str | None, cause: BaseException | None) -> None:
        assert self.groups is not None
        errors = gather_objects(error, self.groups.world)
        ranks_of: dict[str, list[int]] = {}
        for rank, text in enumerate(errors):
            if text is not None:
                ranks_of.setdefault(text, []).append(rank)
        if not ranks_of:
            return
        told = [
            text if len(ranks) == len(errors) else f"{text} (ranks {', '.join(map(str, ranks))})"
            for text, ranks in ranks_of.items()
        ]
        raise StartError(f"start, {name}: " + "\n".join(told)) from cause
