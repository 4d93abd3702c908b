import json
from pathlib import Path

import pytest

from grpo_megatron.monitor import records
from grpo_megatron.monitor.plots import write_plots
from grpo_megatron.monitor.records import Alert, EvaluationReport, StepReport
from grpo_megatron.monitor.run_report import RunReport, build_run_report, report_text, write_run_report
from grpo_megatron.monitor.sinks import JsonlSink, SinkSet

pytestmark = pytest.mark.unit


def write_run(folder: Path, *, num_steps: int, evaluated: bool = True) -> None:
    """Rewards 0.1, 0.2, ...; rollouts of 2 s at 100 tokens/s and in the last step 6 s at 20."""
    sink = JsonlSink(folder, resume_step=0)
    for step in range(num_steps + 1):
        if step:
            last = step == num_steps
            values = {
                records.REWARD: step / 10,
                records.SIGNAL_SHARE: 0.5,
                records.ANSWER_TOKENS: 5.0,
                records.TRUNCATED_SHARE: 0.25,
                records.GAP_MEAN: 1e-3,
                records.GAP_MAX: 1e-2,
                records.ROLLOUT_TOKENS_PER_SECOND: 20.0 if last else 100.0,
            }
            phases = {"rollout": 6.0 if last else 2.0, "update": 3.0, "other": 1.0}
            sink.step(StepReport(step, num_steps, values, phases, sum(phases.values()), {"update/optimizer": 0.5}))
        if evaluated and step in (0, num_steps):
            values = {records.ACCURACY: 0.25 + step / 8, records.ANYWHERE: 0.5, records.NUM_PROBLEMS: 240}
            sink.evaluation(EvaluationReport(step, values, 8.0))
    sink.alert(Alert(2, "alert", "gap/mean", 0.02, 0.01, "x"))
    sink.alert(Alert(3, "warning", "gap/mean", 0.006, 0.005, "x"))
    sink.close()


def test_the_report_sums_up_the_run(tmp_path: Path):
    """Tokens/s: (3 x 2 s x 100 + 6 s x 20) / 12 s = 60, where the mean of the rates would be 80."""
    folder = tmp_path / "sums"
    write_run(folder, num_steps=4)
    report = build_run_report(folder, disabled_sinks={"tensorboard": "OSError: full"})
    assert report == RunReport(
        run="sums",
        num_steps=4,
        seconds=28.0,
        reward_first=pytest.approx(0.15),
        reward_last=pytest.approx(0.35),
        accuracy_before=0.25,
        accuracy_after=0.75,
        anywhere_before=0.5,
        anywhere_after=0.5,
        num_problems=240,
        evaluation_seconds=16.0,
        rollout_tokens_per_second=60.0,
        phase_seconds={"rollout": 12.0, "update": 12.0, "other": 4.0},
        nested_seconds={"update/optimizer": 2.0},
        num_alerts={"gap/mean": 2},
        disabled_sinks={"tensorboard": "OSError: full"},
    )
    assert report_text(report) == "\n".join(
        [
            "run sums: 4 steps in 0:28, 7.0 s a step",
            "reward: 0.150 -> 0.350 (+0.200; means of 2 steps)",
            "accuracy: 0.250 -> 0.750 (+0.500; 240 held-out problems)",
            "anywhere in the text: 0.500 -> 0.500 (+0.000; 240 held-out problems)",
            "rollout: 60 tokens/s",
            "time: rollout 12.0 s (43%), update 12.0 s (43%), other 4.0 s (14%)",
            "evaluations: 16.0 s",
            "alerts: 2 about gap/mean",
            "switched off: tensorboard (OSError: full)",
        ]
    )


def test_the_report_is_written_as_text_and_json(tmp_path: Path):
    write_run(tmp_path, num_steps=2)
    report = build_run_report(tmp_path, disabled_sinks={})
    assert [file.name for file in write_run_report(tmp_path, report)] == ["report.json", "report.txt"]
    assert RunReport(**json.loads((tmp_path / "report.json").read_text())) == report
    assert (tmp_path / "report.txt").read_text() == report_text(report) + "\n"


def test_a_run_without_evaluation_claims_no_accuracy(tmp_path: Path):
    write_run(tmp_path, num_steps=2, evaluated=False)
    report = build_run_report(tmp_path, disabled_sinks={})
    assert report.accuracy_before is None and report.accuracy_after is None
    assert "accuracy" not in report_text(report)


def test_an_evaluation_in_the_middle_is_not_the_one_after(tmp_path: Path):
    sink = JsonlSink(tmp_path, resume_step=0)
    for step in (1, 2):
        sink.step(StepReport(step, 9, {records.REWARD: 0.5}, {"other": 1.0}, 1.0))
    sink.evaluation(EvaluationReport(1, {records.ACCURACY: 0.9}, 1.0))
    report = build_run_report(tmp_path, disabled_sinks={})
    assert report.accuracy_before is None and report.accuracy_after is None


def test_an_empty_run_has_a_report_and_no_plots(tmp_path: Path):
    report = build_run_report(tmp_path, disabled_sinks={})
    assert report.num_steps == 0 and report_text(report).startswith("run ")
    assert write_plots(tmp_path) == []


def test_plots_show_what_was_measured_and_leave_out_what_was_not(tmp_path: Path):
    """Real files: each must be a picture with ink on it, and the curve's colour must be in the reward plot."""
    from matplotlib.image import imread

    write_run(tmp_path / "full", num_steps=12)
    files = {file.stem: file for file in write_plots(tmp_path / "full")}
    assert list(files) == ["reward", "accuracy", "signal", "answer_tokens", "gap", "seconds", "overview"]
    picture = imread(files["reward"])
    assert min(picture.shape[:2]) > 400
    blue = (abs(picture[..., :3] - (0.0, 0x72 / 255, 0xB2 / 255)) < 0.02).all(axis=-1)
    assert blue.sum() > 500, "the reward curve is drawn"

    sink = JsonlSink(tmp_path / "bare", resume_step=0)
    sink.step(StepReport(1, 1, {records.REWARD: 0.5}, {"rollout": 1.0}, 1.0))
    assert [file.stem for file in write_plots(tmp_path / "bare")] == ["reward", "seconds", "overview"]


def test_plots_that_cannot_be_drawn_do_not_stop_the_run(tmp_path: Path):
    write_run(tmp_path, num_steps=1)
    (tmp_path / "plots").write_text("a file where the folder should be")
    warnings: list[str] = []
    sinks = SinkSet([], warn=warnings.append)
    assert not sinks.attempt("plots", "the end of the run", lambda: write_plots(tmp_path))
    assert len(warnings) == 1 and warnings[0].startswith("plots could not take the end of the run")
    assert list(sinks.failures) == ["plots"]
