import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_megatron.utils.logging import setup_logging

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)
    logging.captureWarnings(False)


def test_rank_zero_speaks_on_the_console_and_in_its_file(tmp_path: Path):
    console = io.StringIO()
    logger = setup_logging(tmp_path / "logs", rank=0, stream=console)
    logger.info("step 1/40")
    logger.warning("gap is wide")
    lines = console.getvalue().splitlines()
    assert [line[9:] for line in lines] == ["step 1/40", "WARNING: gap is wide"]
    file_lines = (tmp_path / "logs/rank-0.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in file_lines] == ["INFO    step 1/40", "WARNING gap is wide"]


def test_other_ranks_write_their_file_and_only_errors_reach_the_console(tmp_path: Path):
    console = io.StringIO()
    logger = setup_logging(tmp_path, rank=3, stream=console)
    logger.info("hello")
    logger.warning("careful")
    logger.error("broken")
    assert console.getvalue()[9:] == "[rank 3] ERROR: broken\n"
    assert len((tmp_path / "rank-3.log").read_text().splitlines()) == 3


def test_libraries_are_kept_off_the_console_unless_they_report_errors(tmp_path: Path):
    console = io.StringIO()
    setup_logging(tmp_path, rank=0, stream=console)
    library = logging.getLogger("some_library")
    library.info("chatter")
    library.warning("deprecated")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old name", UserWarning, stacklevel=1)
    library.error("serious")
    assert console.getvalue()[9:] == "ERROR: serious\n"
    text = (tmp_path / "rank-0.log").read_text()
    assert "chatter" not in text
    assert "deprecated" in text and "old name" in text and "serious" in text


def test_setting_up_again_does_not_say_everything_twice_and_appends_to_the_file(tmp_path: Path):
    first, second = io.StringIO(), io.StringIO()
    setup_logging(tmp_path, rank=0, stream=first).info("before")
    setup_logging(tmp_path, rank=0, stream=second).info("after")
    assert first.getvalue().count("\n") == 1 and second.getvalue().count("\n") == 1
    assert len((tmp_path / "rank-0.log").read_text().splitlines()) == 2
