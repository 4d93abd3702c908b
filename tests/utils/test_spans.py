import math

import pytest

from grpo_megatron.utils.spans import PhaseTimer

pytestmark = pytest.mark.unit


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_phases_and_the_rest_sum_to_the_step():
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    clock.wait(0.5)
    with timer.span("rollout"):
        clock.wait(3)
    clock.wait(0.25)
    with timer.span("update"):
        clock.wait(2)
    times = timer.finish_step()
    assert times.total == 5.75
    assert times.phases == {"rollout": 3.0, "update": 2.0, "other": 0.75}
    assert math.fsum(times.phases.values()) == times.total


def test_nested_spans_are_part_of_their_phase_and_not_counted_twice():
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with timer.span("update"):
        clock.wait(1)
        for _ in range(2):
            with timer.span("mini_batch"):
                clock.wait(2)
                with timer.span("optimizer"):
                    assert timer.current == "update/mini_batch/optimizer"
                    clock.wait(0.5)
    times = timer.finish_step()
    assert times.phases == {"update": 6.0, "other": 0.0}
    assert times.nested == {"update/mini_batch": 5.0, "update/mini_batch/optimizer": 1.0}


def test_a_phase_that_runs_twice_adds_up_and_the_next_step_starts_at_zero():
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    for seconds in (1, 2):
        with timer.span("rollout"):
            clock.wait(seconds)
    assert timer.finish_step().phases["rollout"] == 3.0
    clock.wait(4)
    times = timer.finish_step()
    assert times.total == 4.0 and times.phases == {"other": 4.0}


def test_a_span_that_raises_is_counted_and_closed():
    clock = Clock()
    timer = PhaseTimer(clock=clock)
    with pytest.raises(RuntimeError), timer.span("rollout"):
        clock.wait(2)
        raise RuntimeError
    assert timer.current == ""
    assert timer.finish_step().phases == {"rollout": 2.0, "other": 0.0}


def test_the_device_is_waited_for_where_a_phase_begins_and_ends():
    """1 s is queued before the phase and 2 s inside: both waits count where the work was queued."""
    clock = Clock()
    queued = [1.0]

    def synchronize() -> None:
        clock.wait(queued[0])
        queued[0] = 0.0

    timer = PhaseTimer(clock=clock, synchronize=synchronize)
    with timer.span("update"):
        queued[0] = 2.0
    times = timer.finish_step()
    assert times.phases == {"update": 2.0, "other": 1.0}


def test_spans_inside_of_a_phase_do_not_wait_for_the_device():
    """Waiting there would take away the overlap that the phase is built on."""
    waits: list[None] = []
    timer = PhaseTimer(clock=Clock(), synchronize=lambda: waits.append(None))
    with timer.span("update"), timer.span("forward"):
        pass
    assert len(waits) == 2


def test_a_step_cannot_end_inside_a_phase():
    timer = PhaseTimer()
    with pytest.raises(AssertionError, match="inside of update"), timer.span("update"):
        timer.finish_step()
