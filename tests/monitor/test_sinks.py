import json
import math
from pathlib import Path

import pytest

from grpo_megatron.batch import Prompt, RewardResult, RewardSpec, Rollout, ScoredRollout, VersionSpan
from grpo_megatron.monitor import records
from grpo_megatron.monitor.history import read_history
from grpo_megatron.monitor.records import Alert, EvaluationReport, StepReport
from grpo_megatron.monitor.sinks import ConsoleSink, JsonlSink, RolloutSink, Sink, SinkSet, TensorboardSink

pytestmark = pytest.mark.unit


def report(step: int, reward: float = 0.5, **values: float) -> StepReport:
    phases = {"rollout": 3.0, "update": 5.5, "other": 0.5}
    return StepReport(step, 40, {records.REWARD: reward, **values}, phases, 9.0, {"update/optimizer": 1.5})


def write_jsonl(folder: Path, *, resume_step: int, steps: list[int], reward: float = 0.5) -> JsonlSink:
    sink = JsonlSink(folder, resume_step=resume_step, clock=lambda: 1000.0)
    for step in steps:
        sink.step(report(step, reward))
    sink.close()
    return sink


def test_console_says_a_step_in_one_line_with_what_was_measured():
    lines: list[str] = []
    sink = ConsoleSink(say=lines.append, warn=lines.append)
    sink.step(report(11, 0.381))
    values = {
        records.SIGNAL_SHARE: 0.62,
        records.ANSWER_TOKENS: 7.3,
        records.LOSS: 0.0123,
        records.GRADIENT_NORM: 1.42,
        records.KL_REFERENCE: 0.001,
        records.GAP_MEAN: 2.1e-4,
        records.ROLLOUT_TOKENS_PER_SECOND: 512.4,
        records.ACCURACY: 0.553,
    }
    sink.step(report(12, 0.412, **values))
    assert lines[0] == "step 11/40 | reward 0.381 | 9.0 s: rollout 3.0, update 5.5, other 0.5 | 4:21 left"
    assert lines[1] == (
        "step 12/40 | reward 0.412 (+0.031) | accuracy 0.553 | signal 62% | answer 7.3 tokens | loss +0.0123 | "
        "gradient 1.42 | kl 1.0e-03 | gap 2.1e-04 | 512 tokens/s | "
        "9.0 s: rollout 3.0, update 5.5, other 0.5 | 4:12 left"
    )
    sink.step(report(13, 0.402))
    assert lines[2].startswith("step 13/40 | reward 0.402 (-0.010) | ")


def test_console_says_evaluations_and_alerts():
    lines: list[str] = []
    sink = ConsoleSink(say=lines.append, warn=lambda line: lines.append(f"! {line}"))
    values = {records.ACCURACY: 0.27, records.ANYWHERE: 0.436, records.NUM_PROBLEMS: 243}
    sink.evaluation(EvaluationReport(0, values, 8.5))
    sink.alert(Alert(12, "alert", "gap/mean", 0.02, 0.01, "compare dtypes"))
    assert lines == [
        "evaluation before the first step | accuracy 0.270 | anywhere 0.436 | 243 problems | 8.5 s",
        "! alert: step 12: gap/mean is 0.02, limit 0.01: compare dtypes",
    ]


def test_history_reads_back_what_was_written(tmp_path: Path):
    sink = JsonlSink(tmp_path, resume_step=0)
    written = report(1, 0.25, **{"policy/ratio_max": 1.5})
    evaluation = EvaluationReport(1, {records.ACCURACY: 0.27}, 8.5)
    alert = Alert(1, "warning", "gap/mean", 0.006, 0.005, "a line\u2028with a separator")
    sink.step(written)
    sink.evaluation(evaluation)
    sink.alert(alert)
    history = read_history(tmp_path / "metrics.jsonl")  # not closed: every line is flushed
    assert history.steps == (written,)
    assert history.evaluations == (evaluation,)
    assert history.alerts == (alert,)
    assert history.num_unreadable_lines == 0


def test_numbers_that_are_none_are_valid_json_and_read_back(tmp_path: Path):
    sink = JsonlSink(tmp_path, resume_step=0)
    sink.step(report(1, math.nan, **{"loss/total": math.inf, "gap/max": -math.inf}))
    sink.alert(Alert(1, "alert", "loss/total", math.nan, None, "stop"))
    text = (tmp_path / "metrics.jsonl").read_text()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    for line in text.splitlines():
        json.loads(line, parse_constant=refuse)
    history = read_history(tmp_path / "metrics.jsonl")
    assert math.isnan(history.steps[0].values[records.REWARD])
    assert history.steps[0].values["loss/total"] == math.inf and history.steps[0].values["gap/max"] == -math.inf
    assert math.isnan(history.alerts[0].value)


def test_resume_moves_the_lines_of_steps_that_are_done_again(tmp_path: Path):
    """Five steps, checkpoint of version 3: steps 4 and 5 go to the file beside, and come again once."""
    write_jsonl(tmp_path, resume_step=0, steps=[1, 2, 3, 4, 5], reward=0.1)
    sink = write_jsonl(tmp_path, resume_step=3, steps=[4, 5, 6], reward=0.9)
    assert (sink.cut.num_kept, sink.cut.num_discarded) == (3, 2)
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    rewards = [step.values[records.REWARD] for step in read_history(tmp_path / "metrics.jsonl").steps]
    assert rewards == [0.1] * 3 + [0.9] * 3
    write_jsonl(tmp_path, resume_step=5, steps=[])
    beside = [json.loads(line) for line in (tmp_path / "metrics.discarded.jsonl").read_text().splitlines()]
    assert [(line["step"], line[records.REWARD]) for line in beside] == [(4, 0.1), (5, 0.1), (6, 0.9)]


def test_resume_keeps_evaluations_and_alerts_up_to_the_version(tmp_path: Path):
    sink = JsonlSink(tmp_path, resume_step=0)
    for step in (0, 2, 4):
        sink.evaluation(EvaluationReport(step, {records.ACCURACY: 0.1 * step}, 1.0))
        sink.alert(Alert(step, "warning", "gap/mean", 1.0, 0.5, "x"))
    JsonlSink(tmp_path, resume_step=2)
    history = read_history(tmp_path / "metrics.jsonl")
    assert [evaluation.step for evaluation in history.evaluations] == [0, 2]
    assert [alert.step for alert in history.alerts] == [0, 2]


def test_a_line_torn_by_a_kill_does_not_spoil_the_next_one(tmp_path: Path):
    write_jsonl(tmp_path, resume_step=0, steps=[1, 2])
    file = tmp_path / "metrics.jsonl"
    torn = file.read_text()[:-40]
    file.write_text(torn)
    assert read_history(file).num_unreadable_lines == 1
    write_jsonl(tmp_path, resume_step=2, steps=[3])
    history = read_history(file)
    assert [step.step for step in history.steps] == [1, 3] and history.num_unreadable_lines == 0
    assert torn.splitlines()[1] in (tmp_path / "metrics.discarded.jsonl").read_text()


def test_resuming_at_the_end_of_the_file_discards_nothing(tmp_path: Path):
    write_jsonl(tmp_path, resume_step=0, steps=[1, 2])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    JsonlSink(tmp_path, resume_step=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert not (tmp_path / "metrics.discarded.jsonl").exists()


def test_a_sink_that_raises_is_switched_off_with_one_warning_and_the_others_go_on(tmp_path: Path):
    class Broken(Sink):
        name = "broken thing"
        calls = 0

        def step(self, report: StepReport) -> None:
            self.calls += 1
            raise OSError(28, "No space left on device")

    broken, warnings = Broken(), []
    jsonl = JsonlSink(tmp_path, resume_step=0)
    sinks = SinkSet([broken, jsonl], warn=warnings.append)
    for step in (1, 2, 3):
        sinks.step(report(step))
    sinks.close()
    assert broken.calls == 1
    assert len(warnings) == 1 and "broken thing" in warnings[0] and "No space left" in warnings[0]
    assert list(sinks.failures) == ["broken thing"]
    assert len(read_history(tmp_path / "metrics.jsonl").steps) == 3


def test_a_full_disk_switches_the_file_off_and_not_the_run(tmp_path: Path):
    warnings: list[str] = []
    jsonl = JsonlSink(tmp_path, resume_step=0)
    jsonl._file.close()
    jsonl._file = open("/dev/full", "a")  # noqa: SIM115 - every write to it says that the disk is full
    sinks = SinkSet([jsonl], warn=warnings.append)
    sinks.step(report(1))
    sinks.step(report(2))
    assert len(warnings) == 1 and "metrics.jsonl could not take step 1" in warnings[0]


def test_a_sink_that_cannot_be_opened_is_left_out_with_one_warning(tmp_path: Path):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    warnings: list[str] = []
    makers = {
        "tensorboard": lambda: TensorboardSink(tmp_path / "tensorboard", resume_step=0),
        "metrics.jsonl": lambda: JsonlSink(tmp_path, resume_step=0),
    }
    sinks = SinkSet.opened(makers, warn=warnings.append)
    sinks.step(report(1))
    assert len(warnings) == 1 and warnings[0].startswith("tensorboard could not take the start of the run")
    assert list(sinks.failures) == ["tensorboard"]
    assert len(read_history(tmp_path / "metrics.jsonl").steps) == 1


def test_an_interrupt_is_not_swallowed():
    class Interrupted(Sink):
        def step(self, report: StepReport) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SinkSet([Interrupted()], warn=print).step(report(1))


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path):
    """Steps 1 to 5, then resumed after 3: the reader must see the second 4 and 5, and 1 to 3 untouched."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps, reward in ((0, [1, 2, 3, 4, 5], 0.25), (3, [4, 5], 0.75)):
        sink = TensorboardSink(tmp_path, resume_step=resume_step)
        for step in steps:
            sink.step(report(step, reward))
        if not resume_step:
            sink.evaluation(EvaluationReport(3, {records.ACCURACY: 0.5}, 1.0))
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    rewards = [(event.step, event.value) for event in events.Scalars(records.REWARD)]
    assert rewards == [(1, 0.25), (2, 0.25), (3, 0.25), (4, 0.75), (5, 0.75)]
    assert [(event.step, event.value) for event in events.Scalars(records.ACCURACY)] == [(3, 0.5)]
    assert [event.value for event in events.Scalars("seconds/update")] == [5.5] * 5


def scored(index: int, score: float | None, error: str | None = None) -> ScoredRollout:
    prompt = Prompt("add-3-5", (1, 42, 7), "3 + 5 =", RewardSpec("exact", "8"), "arithmetic")
    rollout = Rollout("add-3-5", index, (8, 2), (-0.1, -0.2), "stop", (VersionSpan(0, 2, 4),), "\u0668")
    return ScoredRollout(prompt, rollout, RewardResult(score, {} if score is None else {"correct": score}, error))


def test_rollouts_are_written_for_people_to_read(tmp_path: Path):
    sink = RolloutSink(tmp_path / "rollouts", every_steps=20)
    sink.rollouts(40, [scored(0, 1.0), scored(1, None, "timeout: no answer within 10 s")], [0.5, None])
    lines = (tmp_path / "rollouts/step-000040.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {
        "prompt_id": "add-3-5",
        "index": 0,
        "source": "arithmetic",
        "prompt": "3 + 5 =",
        "answer": "\u0668",
        "score": 1.0,
        "parts": {"correct": 1.0},
        "error": None,
        "advantage": 0.5,
        "finish_reason": "stop",
        "num_prompt_tokens": 3,
        "num_answer_tokens": 2,
        "versions": [[0, 2, 4]],
    }
    assert "\u0668" in lines[0], "text is readable as it is, not escaped"
    second = json.loads(lines[1])
    assert (second["score"], second["advantage"], second["error"]) == (None, None, "timeout: no answer within 10 s")


@pytest.mark.parametrize(("every_steps", "expected"), [(0, []), (2, [1, 2, 4]), (1, [1, 2, 3, 4])])
def test_rollouts_are_written_for_the_first_step_and_every_nth(tmp_path: Path, every_steps, expected):
    sink = RolloutSink(tmp_path, every_steps=every_steps)
    for step in (1, 2, 3, 4):
        sink.rollouts(step, [scored(0, 1.0)], [0.0])
    assert sorted(int(file.stem[-6:]) for file in tmp_path.glob("*.jsonl")) == expected


def test_rollouts_and_advantages_that_do_not_match_leave_no_half_file(tmp_path: Path):
    warnings: list[str] = []
    sinks = SinkSet([RolloutSink(tmp_path, every_steps=1)], warn=warnings.append)
    sinks.rollouts(1, [scored(0, 1.0), scored(1, 0.0)], [0.5])
    assert len(warnings) == 1 and not list(tmp_path.glob("*.jsonl"))
