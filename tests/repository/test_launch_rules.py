from types import SimpleNamespace

import pytest

from launch_scripts.launch import describe, exit_code

pytestmark = pytest.mark.unit


def failures(*codes_in_order: tuple[int, int]) -> dict[int, SimpleNamespace]:
    """(rank, exit code) in the order in which the ranks ended."""
    return {
        rank: SimpleNamespace(exitcode=code, timestamp=100 + place, pid=1000 + rank)
        for place, (rank, code) in enumerate(codes_in_order)
    }


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([(0, 1), (1, 1)], 1),
        ([(1, 3), (0, -15)], 3),
        ([(1, -9), (0, 5)], 137),
        ([(1, 4), (0, 3)], 4),
        ([(0, 5), (1, 5)], 5),
        ([(0, 5), (1, -15)], 5),
        ([(0, 5), (1, 143)], 5),
        ([(0, -15), (1, -15)], 143),
        ([(1, -11), (0, 3)], 139),
    ],
)
def test_the_cause_decides_and_not_what_it_did_to_the_other_ranks(codes: list[tuple[int, int]], expected: int) -> None:
    assert exit_code(failures(*codes)) == expected


def test_the_report_names_the_signal_that_killed_a_rank() -> None:
    line = describe(failures((1, -9), (0, 5)))
    assert line == "rank 0: exit code 5 (pid 1000), rank 1: killed by SIGKILL (pid 1001)"
