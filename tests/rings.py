"""Pytest plugin of `.ci/run`: rings in order, seconds per ring, and no ring that is silently empty.

python -m pytest -p tests.rings [--require-rings architecture,unit]
"""

from collections import Counter, defaultdict

import pytest

RINGS = ("architecture", "unit", "distributed", "numerics", "engines", "end_to_end", "faults", "gpu")
_RING = pytest.StashKey[str]()


class RingReport:
    """Orders the tests by ring and adds up how long each ring took."""

    def __init__(self, required: list[str]) -> None:
        self._required = required
        self._misfits: list[str] = []
        self._ring_of: dict[str, str] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort by ring; what belongs to no ring or to several is remembered and refused."""
        for item in items:
            rings = [ring for ring in RINGS if item.get_closest_marker(ring)]
            if len(rings) == 1:
                item.stash[_RING] = rings[0]
            else:
                self._misfits.append(f"{item.nodeid} has the rings {', '.join(rings) or 'none'}")
        items.sort(key=lambda item: RINGS.index(item.stash.get(_RING, RINGS[0])))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse to pass because there was nothing to fail."""
        if self._misfits:
            raise pytest.UsageError(f"mark each test with one of {RINGS}:", *self._misfits)
        self._ring_of = {item.nodeid: item.stash[_RING] for item in session.items}
        empty = [ring for ring in self._required if ring not in self._ring_of.values()]
        if empty:
            raise pytest.UsageError(f"no test of the ring {', '.join(empty)} was selected")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count set-up and tear-down into the ring as well."""
        ring = self._ring_of[report.nodeid]
        self._seconds[ring] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[ring][report.outcome] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line for each ring that ran."""
        terminalreporter.section("rings")
        for ring in RINGS:
            if ring in self._seconds:
                outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._outcomes[ring].items()))
                terminalreporter.write_line(f"{ring:<14}{self._seconds[ring]:7.1f} s  {outcomes}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-rings", default="", help="comma-separated rings of which at least one test must run")


def pytest_configure(config: pytest.Config) -> None:
    required = [ring for ring in config.getoption("--require-rings").split(",") if ring]
    config.pluginmanager.register(RingReport(required), "ring-report")
