from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checkpoint.base import CheckpointError, Coordination, OneProcess
from grpo_megatron.checkpoint.checkpointer import Checkpointer, RunState
from grpo_megatron.checkpoint.store import CheckpointStore
from tests.checkpoint.stores import DESCRIPTION, names
from tests.checkpoint.test_run_state import Counter

pytestmark = pytest.mark.unit


class TextModel:
    """A model whose weights are a text; `failure` is raised in the middle of a save."""

    def __init__(self, weights: str, failure: Exception | None = None) -> None:
        self.weights = weights
        self.failure = failure

    def num_bytes(self) -> int:
        return len(self.weights)

    def save(self, folder: Path, coordination: Coordination) -> None:
        (folder / "weights").write_text(self.weights)
        coordination.agree(None if self.failure is None else str(self.failure), "saving tensors")

    def load(self, folder: Path) -> None:
        self.weights = (folder / "weights").read_text()


def make_checkpointer(folder: Path, keep: int = 3) -> Checkpointer:
    return Checkpointer(CheckpointStore(folder, keep=keep), OneProcess())


def state(step: Any) -> RunState:
    return RunState(shared={"step": Counter(step)}, per_rank={"random": Counter(step)})


def test_a_run_finds_its_newest_version_with_model_and_state(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    for step in (1, 2):
        report = checkpointer.save(step, TextModel(f"weights {step}"), state(step), DESCRIPTION)
        assert report.checkpoint.version == step and report.num_bytes > len("weights 1")
    model, run_state = TextModel(""), state(None)
    report = checkpointer.load(None, model, run_state)
    assert report is not None and report.checkpoint.version == 2 and report.skipped == ()
    assert model.weights == "weights 2"
    assert run_state.shared["step"].state == run_state.per_rank["random"].state == 2


def test_an_empty_folder_has_nothing_to_load_and_touches_nothing(tmp_path: Path) -> None:
    model = TextModel("untouched")
    assert make_checkpointer(tmp_path).load(None, model, state(None)) is None
    assert model.weights == "untouched"


def test_a_version_with_a_flipped_byte_is_skipped_with_its_reason_and_the_one_before_loads(tmp_path: Path) -> None:
    """Case C2: the size is right, the contents are not."""
    checkpointer = make_checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, TextModel(f"weights {step}"), state(step), DESCRIPTION)
    (tmp_path / "version-000002" / "model" / "weights").write_text("weights 3")
    model = TextModel("")
    report = checkpointer.load(None, model, state(None))
    assert report is not None and report.checkpoint.version == 1 and model.weights == "weights 1"
    assert [skipped.path.name for skipped in report.skipped] == ["version-000002"]
    assert "model/weights is damaged" in report.skipped[0].reason
    assert (tmp_path / "version-000002").is_dir()
    with pytest.raises(CheckpointError, match="version-000002 is not valid: model/weights is damaged"):
        checkpointer.load(2, model, state(None))
    (moved,) = checkpointer.set_aside_after(1)
    for step in (2, 3):
        checkpointer.save(step, TextModel(f"weights {step}"), state(step), DESCRIPTION)
    assert moved.name.startswith("invalid-000002") and (moved / "model" / "weights").read_text() == "weights 3"


def test_an_older_version_can_be_asked_for(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, TextModel(f"weights {step}"), state(step), DESCRIPTION)
    model = TextModel("")
    report = checkpointer.load(1, model, state(None))
    assert report is not None and report.checkpoint.version == 1 and model.weights == "weights 1"


def test_a_save_that_fails_leaves_the_older_versions_and_no_rubbish(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, keep=1)
    checkpointer.save(1, TextModel("weights 1"), state(1), DESCRIPTION)
    with pytest.raises(CheckpointError, match="rank 0 tripped"):
        checkpointer.save(2, TextModel("weights 2", CheckpointError("rank 0 tripped")), state(2), DESCRIPTION)
    assert names(tmp_path) == ["version-000001"]
    checkpointer.save(2, TextModel("weights 2"), state(2), DESCRIPTION)
    assert names(tmp_path) == ["version-000002"]


def test_a_state_that_is_not_plain_data_stops_the_save_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step\.value: set is not plain data"):
        make_checkpointer(tmp_path).save(1, TextModel("w"), state({1}), DESCRIPTION)
    assert names(tmp_path) == []
