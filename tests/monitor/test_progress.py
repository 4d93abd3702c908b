import io

import pytest

from grpo_megatron.monitor.console import duration_text
from grpo_megatron.monitor.progress import open_progress

pytestmark = pytest.mark.unit


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def test_off_a_terminal_a_line_comes_every_few_seconds_with_rate_and_remaining_time():
    """128 answers, 8 a second, asked every second: lines at 5, 10, 15 s and at the end."""
    clock, lines = Clock(), []
    with open_progress("rollout", total=128, unit="answers", kind="lines", say=lines.append, clock=clock) as progress:
        for _ in range(16):
            clock.now += 1.0
            progress.advance(8)
    assert lines == [
        "rollout: 40/128 answers (31%), 8.0 answers/s, 0:11 left",
        "rollout: 80/128 answers (62%), 8.0 answers/s, 0:06 left",
        "rollout: 120/128 answers (94%), 8.0 answers/s, 0:01 left",
        "rollout: 128/128 answers (100%), 8.0 answers/s, 0:16",
    ]


def test_work_that_is_done_at_once_says_nothing():
    lines: list[str] = []
    with open_progress("loading", total=3, unit="tensors", kind="lines", say=lines.append, clock=Clock()) as progress:
        progress.advance(3)
    assert lines == []


def test_without_a_total_it_counts():
    clock, lines = Clock(), []
    with open_progress("reading", total=None, unit="lines", kind="lines", say=lines.append, clock=clock) as progress:
        clock.now += 10
        progress.advance(25)
    assert lines[0] == "reading: 25 lines, 2.5 lines/s"


def test_nothing_done_yet_and_an_empty_total_divide_by_nothing():
    clock, lines = Clock(), []
    with open_progress("x", total=0, unit="items", kind="lines", say=lines.append, clock=clock) as progress:
        clock.now += 10
        progress.advance(0)
    with open_progress("x", total=5, unit="items", kind="lines", say=lines.append, clock=clock) as progress:
        clock.now += 10
        progress.advance(0)
    assert lines[0] == "x: 0/0 items (100%), 0.0 items/s, 0:10"
    assert lines[-1] == "x: 0/5 items (0%), 0.0 items/s, 0:10"


def test_auto_takes_lines_for_a_file_and_a_bar_for_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    file, terminal = io.StringIO(), Terminal()
    for stream in (file, terminal):
        with open_progress("rollout", total=4, unit="answers", stream=stream) as progress:
            for _ in range(4):
                progress.advance()
    assert file.getvalue() == ""
    assert "rollout" in terminal.getvalue() and "\r" in terminal.getvalue()


def test_silent_ranks_write_nothing():
    stream = io.StringIO()
    with open_progress("rollout", total=4, unit="answers", kind="silent", stream=stream) as progress:
        progress.advance(4)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "0:07"), (255, "4:15"), (7420, "2:03:40"), (0, "0:00")])
def test_durations(seconds, text):
    assert duration_text(seconds) == text
