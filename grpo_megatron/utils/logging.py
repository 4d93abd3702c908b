"""One logger for the program: a file per rank, the console on rank 0, one line per message."""

import faulthandler
import logging
import sys
from pathlib import Path
from typing import TextIO

LOGGER_NAME = "grpo_megatron"


def setup_logging(folder: Path, *, rank: int, stream: TextIO | None = None) -> logging.Logger:
    """Send the program's messages to `<folder>/rank-N.log`, and to the console: all of rank 0, errors of the others.

    A message with `extra={"file_only": True}` goes to the file alone. Messages of libraries, and Python warnings, go to
    the file from level WARNING on, and to the console if they are errors. A resumed run appends. Calling it again
    replaces what it set up before.

    Args:
        stream: the console; standard error if None.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _RankFile | _Console)]:
        root.removeHandler(handler)
        handler.close()
    folder.mkdir(parents=True, exist_ok=True)
    file = _RankFile(folder / f"rank-{rank}.log", mode="a", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    file.addFilter(_OursOrAtLeast(logging.WARNING))
    console = _Console(sys.stderr if stream is None else stream)
    console.setFormatter(_ConsoleFormatter(rank))
    console.addFilter(_OursOrAtLeast(logging.ERROR))
    console.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    root.addHandler(file)
    root.addHandler(console)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    return logging.getLogger(LOGGER_NAME)


def dump_stacks_on(number: int, folder: Path, *, rank: int) -> TextIO:
    """Write the stacks of all threads to `<folder>/stacks-rank-N.log` when this signal comes, also inside a hung call.

    The file stays open as long as the returned object lives.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"stacks-rank-{rank}.log").open("a", encoding="utf-8")
    faulthandler.register(number, file=file, all_threads=True)
    return file


class _RankFile(logging.FileHandler):
    """The rank's own file. On a full disk it says so once; training does not end for want of a log."""

    has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not self.has_failed:
            self.has_failed = True
            print(f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=sys.stderr)


class _Console(logging.StreamHandler):
    """Writes above a progress bar if one is on the terminal, and not through the middle of it."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "file_only", False):
            return
        # Imported late: processes that only read settings have no need of it.
        from tqdm import tqdm

        with tqdm.external_write_mode(file=self.stream, nolock=False):
            super().emit(record)


class _ConsoleFormatter(logging.Formatter):
    """Plain lines; the level is named from WARNING on, the rank where it is not 0."""

    def __init__(self, rank: int) -> None:
        super().__init__("%(asctime)s %(prefix)s%(message)s", datefmt="%H:%M:%S")
        self._rank = f"[rank {rank}] " if rank else ""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
        record.prefix = self._rank + level
        return super().format(record)


class _OursOrAtLeast(logging.Filter):  # noqa: N801 - reads as the condition that it is
    """Lets through what the program says, and of libraries what is at least this serious."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self._level = level

    def filter(self, record: logging.LogRecord) -> bool:
        ours = record.name == LOGGER_NAME or record.name.startswith(f"{LOGGER_NAME}.")
        return ours or record.levelno >= self._level
