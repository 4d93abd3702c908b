import json
import math

import pytest

from grpo_megatron.config.schema import MonitorSection
from grpo_megatron.monitor import records
from grpo_megatron.monitor.alerts import AlertRules, HealthReport
from grpo_megatron.monitor.records import StepReport

pytestmark = pytest.mark.unit


def rules() -> AlertRules:
    return AlertRules(MonitorSection(gap_warn=0.005, gap_alert=0.01), max_error_share=0.5)


def judge(of: AlertRules, step: int, **values: float) -> HealthReport:
    names = {name: getattr(records, name) for name in values}
    return of.judge(StepReport(step, 100, {names[name]: value for name, value in values.items()}, {}, 1.0))


def steps_that_alert(of: AlertRules, metric: str, values: list[float]) -> list[tuple[int, str]]:
    found = []
    for step, value in enumerate(values, 1):
        found += [(step, alert.severity) for alert in judge(of, step, **{metric: value}).alerts]
    return found


def test_a_healthy_run_raises_nothing():
    of = rules()
    for step in range(1, 60):
        health = judge(
            of,
            step,
            REWARD=0.3 + 0.001 * step,
            REWARD_ERROR_SHARE=0.5,
            SIGNAL_SHARE=0.1,
            GAP_MEAN=0.005,
            LOSS=0.0,
            GRADIENT_NORM=1.0 + step % 7,
        )
        assert health == HealthReport("go_on", ())


def test_the_gap_warns_above_one_limit_and_alerts_above_the_other():
    gaps = [0.005, 0.0051, 0.01, 0.0101, 0.001]
    assert steps_that_alert(rules(), "GAP_MEAN", gaps) == [(2, "warning"), (4, "alert")]


def test_a_condition_that_lasts_is_repeated_every_ten_steps_and_starts_anew_after_a_pause():
    gaps = [0.02] * 21 + [0.0] + [0.02]
    assert [step for step, _ in steps_that_alert(rules(), "GAP_MEAN", gaps)] == [1, 11, 21, 23]


def test_errors_of_rewards_alert_above_the_configured_share():
    assert steps_that_alert(rules(), "REWARD_ERROR_SHARE", [0.5, 0.51]) == [(2, "alert")]


def test_every_step_with_a_lost_engine_alerts():
    assert steps_that_alert(rules(), "ENGINE_RESTARTS", [0.0, 1.0, 0.0, 2.0]) == [(2, "alert"), (4, "alert")]


def test_groups_without_signal_alert_after_three_steps_in_a_row():
    shares = [0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0]
    assert steps_that_alert(rules(), "SIGNAL_SHARE", shares) == [(6, "alert")]


def test_a_reward_that_does_not_change_in_any_digit_alerts_at_the_tenth_step():
    of = rules()
    found = [judge(of, step, REWARD=0.25).alerts for step in range(1, 13)]
    assert [len(alerts) for alerts in found] == [0] * 9 + [1] + [0] * 2
    assert found[9][0].line().startswith("step 10: reward/score_mean (steps unchanged) is 10, limit 10: ")
    assert steps_that_alert(rules(), "REWARD", [0.25 + 1e-9 * (step % 2) for step in range(30)]) == []


def test_a_gradient_spike_is_measured_against_the_median_of_the_steps_before():
    assert steps_that_alert(rules(), "GRADIENT_NORM", [1.0, 2.0, 1.0, 2.0, 2.0, 20.0, 20.1]) == [(7, "warning")]
    assert steps_that_alert(rules(), "GRADIENT_NORM", [1.0, 1.0, 1.0, 1.0, 99.0]) == [], "too early to know"
    assert steps_that_alert(rules(), "GRADIENT_NORM", [0.0] * 8 + [3.0]) == [], "a median of 0 is no measure"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metric", ["LOSS", "GRADIENT_NORM"])
def test_a_loss_or_gradient_that_is_no_number_stops_the_run(metric, bad):
    health = judge(rules(), 7, **{metric: bad, "REWARD": 0.5})
    assert health.verdict == "stop"
    (alert,) = health.alerts
    assert alert.metric == getattr(records, metric) and "limit" not in alert.line() and "stop" in alert.line()


def test_another_metric_that_is_no_number_alerts_and_the_run_goes_on():
    health = judge(rules(), 7, GAP_MAX=math.nan, LOSS=0.1)
    assert health.verdict == "go_on"
    assert [alert.metric for alert in health.alerts] == [records.GAP_MAX]


def test_a_gradient_norm_that_is_no_number_does_not_spoil_the_measure_of_later_ones():
    of = rules()
    norms = [1.0] * 6 + [math.nan] + [1.0, 50.0]
    found = [judge(of, step, GRADIENT_NORM=norm) for step, norm in enumerate(norms, 1)]
    assert [bool(health.alerts) for health in found] == [False] * 6 + [True, False, True]


def test_every_alert_says_metric_value_limit_and_what_to_do():
    (alert,) = judge(rules(), 3, GAP_MEAN=0.02).alerts
    assert alert.line().startswith("step 3: gap/mean is 0.02, limit 0.01: ")
    assert "modules.training.mismatch.correction" in alert.line() and "\n" not in alert.line()


def test_counts_go_on_after_a_resume():
    """Stopped after every step, saved as JSON and loaded into new rules: the same alerts as in one go."""
    values = [dict(REWARD=0.25, SIGNAL_SHARE=0.0, GAP_MEAN=0.02, GRADIENT_NORM=1.0) for _ in range(24)]
    values[15] |= dict(GRADIENT_NORM=30.0)
    straight = rules()
    expected = [judge(straight, step, **value) for step, value in enumerate(values, 1)]
    state = rules().state_dict()
    resumed = []
    for step, value in enumerate(values, 1):
        of = rules()
        of.load_state_dict(json.loads(json.dumps(state)))
        resumed.append(judge(of, step, **value))
        state = of.state_dict()
    assert resumed == expected
    assert sum(len(health.alerts) for health in expected) > 5
