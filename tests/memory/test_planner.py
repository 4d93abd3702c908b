import pytest

from grpo_megatron.memory.planner import AlwaysOffload, GroupState, Move, NeverOffload, make_planner

pytestmark = pytest.mark.unit

WEIGHTS = GroupState("weights", "device", "far", 10)
GRADIENTS = GroupState("gradients", "device", "discarded", 20)
MOMENTS = GroupState("moments", "far", "far", 40)


def test_always_evicts_what_is_not_needed_before_it_brings_in_what_is() -> None:
    moves = AlwaysOffload().plan([MOMENTS, GRADIENTS, WEIGHTS], frozenset({"weights", "moments"}))
    assert moves == (Move("gradients", "discarded", 20), Move("moments", "device", 40))


def test_always_leaves_alone_what_is_where_it_should_be() -> None:
    assert AlwaysOffload().plan([WEIGHTS, MOMENTS], frozenset({"weights"})) == ()


def test_never_moves_nothing() -> None:
    assert NeverOffload().plan([WEIGHTS, GRADIENTS], frozenset()) == ()


def test_the_policy_of_the_configuration_chooses_the_planner() -> None:
    assert isinstance(make_planner("always"), AlwaysOffload)
    assert isinstance(make_planner("never"), NeverOffload)
