import json
import subprocess
from pathlib import Path

import pytest

from tools.quickstart_summary import summarize

ROOT = Path(__file__).parents[2]
FIGURES = {
    "accuracy_before": 0.25,
    "accuracy_after": 0.75,
    "anywhere_before": 0.5,
    "anywhere_after": 0.8,
    "num_problems": 240,
    "train_seconds": 300.5,
}


def write_report(folder: Path, **changes: object) -> Path:
    export = folder / "exports" / "final"
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    report = FIGURES | {"run": "a run", "export": str(export)}
    (folder / "report.json").write_text(json.dumps(report | changes))
    return export


@pytest.mark.unit
def test_the_summary_takes_its_figures_from_the_report(tmp_path: Path) -> None:
    export = write_report(tmp_path)
    assert summarize(tmp_path) == FIGURES | {"run": str(tmp_path), "checkpoint": str(export)}


@pytest.mark.unit
@pytest.mark.parametrize("changes", [{"accuracy_after": None}, {"export": None}, {"export": "/nowhere"}])
def test_a_run_without_a_result_is_not_summed_up(tmp_path: Path, changes: dict[str, object]) -> None:
    write_report(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"report\.json"):
        summarize(tmp_path)


@pytest.mark.end_to_end
@pytest.mark.timeout(900)
def test_the_quickstart_ends_with_its_figures_and_an_export_that_loads(tmp_path: Path) -> None:
    """The whole command as a user types it; no bound on accuracy after three steps."""
    command = ["bash", "examples/quickstart.sh", "--smoke", f"run.folder={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {*FIGURES, "run", "checkpoint"}
    assert 0 <= figures["accuracy_before"] <= figures["anywhere_before"] <= 1
    assert figures["num_problems"] >= 40
    assert Path(figures["run"]).parent == tmp_path

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(figures["checkpoint"])
    assert model.config.num_hidden_layers == 30
    assert AutoTokenizer.from_pretrained(figures["checkpoint"]).eos_token == "<|im_end|>"
