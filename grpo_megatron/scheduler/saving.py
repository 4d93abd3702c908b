"""Progress of a checkpoint while it is written: a thread that only looks at the sizes of files."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_megatron.monitor.progress import Progress

POLL_SECONDS = 0.5
MEGABYTE = 1_000_000


@contextmanager
def watch_saving(folder: Path, *, num_bytes: int, open_progress: Callable[[int], Progress]) -> Iterator[None]:
    """Show how many megabytes of a version have reached `folder`, where it is written below a temporary name.

    Args:
        num_bytes: what is expected, about.
        open_progress: makes the display for this many megabytes.
    """
    done = threading.Event()
    with open_progress(max(1, num_bytes // MEGABYTE)) as progress:

        def look() -> None:
            shown = 0
            while not done.wait(POLL_SECONDS):
                megabytes = _bytes_below(folder) // MEGABYTE
                if megabytes > shown:
                    progress.advance(megabytes - shown)
                    shown = megabytes

        watcher = threading.Thread(target=look, daemon=True, name="watch saving")
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def _bytes_below(folder: Path) -> int:
    """Size of the versions that are being written. Files may appear and go while we look."""
    total = 0
    for path in folder.glob(".tmp-version-*/**/*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total
