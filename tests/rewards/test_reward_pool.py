"""The pool of reward workers: hung, dead and lying scorers. Time-outs are short."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.batch import Prompt, RewardSpec, Rollout
from grpo_megatron.config.schema import RewardsSection
from grpo_megatron.rewards.pool import RewardFailure, RewardPool

pytestmark = pytest.mark.unit

REWARDS = '''
import os, sys, time
import numpy as np
from grpo_megatron.batch import RewardResult

def act(prompt, rollout):
    """Does what the answer's text says."""
    text = rollout.text
    if text == "hang":
        time.sleep(1000)
    if text == "die":
        os._exit(3)
    if text == "exit":
        sys.exit(4)
    if text == "raise":
        raise KeyError("no such thing")
    if text == "print":
        print("noise on standard output " * 1000)
        return 1
    values = {
        "int": 1, "bool": True, "float": 0.25, "numpy": np.float32(0.5), "numpy bool": np.bool_(True), "zero": 0,
        "none": None, "nan": float("nan"), "inf": np.inf, "text": "1.0", "array": np.ones(1), "huge": 10**400,
        "vast": 1e308,
        "parts": RewardResult(0.5, {"format": np.int64(1)}), "bad part": RewardResult(0.5, {"format": float("nan")}),
        "own error": RewardResult(None, error="unparsable: no gold"), "empty": RewardResult(None),
    }
    return values[text] if text in values else float(text)

def of_text(text):
    return 1.0
'''


@pytest.fixture(scope="module", autouse=True)
def user_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("user")
    (folder / "user_rewards.py").write_text(REWARDS)
    (folder / "broken_rewards.py").write_text("import a_module_that_is_not_there\n")
    with contextlib.chdir(folder):
        yield


@pytest.fixture(scope="module")
def shared_pool(user_module: None) -> Iterator[RewardPool]:
    with RewardPool(section(workers=2)) as pool:
        yield pool


@pytest.fixture
def pool(shared_pool: RewardPool) -> RewardPool:
    """Started once for the module; its counters start anew."""
    shared_pool.stats()
    return shared_pool


def section(**changes: Any) -> RewardsSection:
    settings: dict[str, Any] = {"default": "user_rewards:act", "timeout_seconds": 20.0, "on_error": "zero", **changes}
    return RewardsSection(**settings)


def submit(pool: RewardPool, *texts: str, prompt_id: str = "p", reward: str = "user_rewards:act") -> None:
    prompt = Prompt(prompt_id, (1,), "", RewardSpec(reward))
    for index, text in enumerate(texts):
        pool.submit(prompt, Rollout(prompt_id, index, (1,), (-0.5,), "stop", (), text))


def worker_ids(parent: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                found.add(int(entry.name))
    return found


def test_results_come_back_under_their_keys_whatever_the_order_of_scoring(pool: RewardPool) -> None:
    submit(pool, *(str(i) for i in range(20)), prompt_id="a")
    submit(pool, *(str(100 + i) for i in range(20)), prompt_id="b")
    results = pool.collect(20)
    expected = {("a", i): float(i) for i in range(20)} | {("b", i): 100.0 + i for i in range(20)}
    assert {key: result.score for key, result in results.items()} == expected
    assert list(results) == sorted(results)
    stats = pool.stats()
    assert (stats.num_scored, stats.num_errors, stats.queue_depth, stats.num_running) == (40, 0, 0, 0)
    assert stats.busy_seconds >= stats.median_seconds > 0
    assert pool.stats().num_scored == 0  # counted since the last call


def test_four_answers_hang_four_workers_and_the_fifth_is_scored() -> None:
    before = worker_ids(os.getpid())
    with RewardPool(section(workers=4, timeout_seconds=0.8)) as pool:
        submit(pool, "hang", "hang", "hang", "hang", "0.75")
        results = pool.collect(30)
        stats = pool.stats()
    assert results["p", 4].score == 0.75 and results["p", 4].error is None
    for index in range(4):
        assert results["p", index].score == 0.0
        assert results["p", index].error == "timeout: no score within 0.8 s"
    assert stats.errors == {"timeout": 4}
    assert stats.num_workers_replaced >= 1  # those replaced after the fifth was scored may come later
    assert worker_ids(os.getpid()) == before


def test_a_worker_that_dies_is_replaced_and_its_neighbours_keep_their_scores(pool: RewardPool) -> None:
    submit(pool, "0.1", "die", "0.2", "raise", "0.3", "exit", "0.4", "print")
    results = pool.collect(20)
    assert [results["p", i].score for i in range(8)] == [0.1, 0.0, 0.2, 0.0, 0.3, 0.0, 0.4, 1.0]
    assert "ended with code 3" in str(results["p", 1].error)
    assert str(results["p", 3].error).startswith("exception: KeyError: 'no such thing' (user_rewards.py:")
    assert str(results["p", 5].error).startswith("exception: SystemExit: 4")
    assert pool.stats().errors == {"died": 1, "exception": 2}


def test_numbers_of_every_kind_are_normalised_and_everything_else_is_a_counted_error(pool: RewardPool) -> None:
    good = {"int": 1.0, "bool": 1.0, "float": 0.25, "numpy": 0.5, "numpy bool": 1.0, "zero": 0.0, "parts": 0.5}
    bad = ["none", "nan", "inf", "text", "array", "huge", "vast", "bad part", "empty"]
    submit(pool, *good, *bad, "own error")
    results = pool.collect(20)
    for index, (name, score) in enumerate(good.items()):
        assert (results["p", index].score, results["p", index].error) == (score, None), name
        assert type(results["p", index].score) is float
    assert results["p", list(good).index("parts")].parts == {"format": 1.0}
    for index, name in enumerate(bad, start=len(good)):
        assert str(results["p", index].error).startswith("bad_value: "), name
    assert "of type numpy.ndarray; return float(value)" in str(results["p", len(good) + bad.index("array")].error)
    assert results["p", len(good) + len(bad)].error == "unparsable: no gold"
    assert pool.stats().errors == {"bad_value": len(bad), "unparsable": 1}


@pytest.mark.parametrize(("policy", "score"), [("zero", 0.0), ("drop", None)])
def test_the_error_policy_gives_zero_or_no_score(policy: str, score: float | None) -> None:
    with RewardPool(section(on_error=policy)) as pool:
        submit(pool, "raise", "0")
        results = pool.collect(20)
    assert results["p", 0].score == score and results["p", 0].error is not None
    assert results["p", 1].score == 0.0 and results["p", 1].error is None  # a real 0 is not an error


def test_under_the_policy_fail_the_run_is_told_which_rollout_failed_and_why() -> None:
    with RewardPool(section(on_error="fail")) as pool:
        submit(pool, "1", "none", prompt_id="sum-3-5")
        with pytest.raises(RewardFailure, match=r"prompt 'sum-3-5', answer 1: bad_value: the reward is None"):
            pool.collect(20)


def test_collect_ends_at_its_deadline_and_the_pool_goes_on() -> None:
    with RewardPool(section(timeout_seconds=100.0)) as pool:
        submit(pool, "hang", "0.5")
        started = time.monotonic()
        results = pool.collect(0.5)
        assert time.monotonic() - started < 2.0
        assert str(results["p", 0].error).startswith("timeout: no score after 0.5 s of collecting")
        submit(pool, "0.25")  # the same key again: the late answer of the first is not taken for it
        assert pool.collect(20)["p", 0].score == 0.25


def test_scoring_streams_while_the_caller_does_something_else(pool: RewardPool) -> None:
    submit(pool, "1", "1", "1")
    deadline = time.monotonic() + 10
    scored = 0
    while scored < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
        scored += pool.stats().num_scored
    assert scored == 3
    assert len(pool.collect(0.0)) == 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken_rewards:act", "No module named 'a_module_that_is_not_there'"),
        ("user_rewards:missing", "user_rewards has no missing"),
        ("user_rewards:REWARDS_TEXT", "user_rewards has no REWARDS_TEXT"),
        ("user_rewards:of_text", "must take (prompt, rollout)"),
        ("maths", "did you mean math?"),
    ],
)
def test_a_reward_that_cannot_be_built_is_refused_at_the_start_with_the_reason(name: str, reason: str) -> None:
    before = worker_ids(os.getpid())
    with pytest.raises(ValueError, match="modules.rewards: reward") as error:
        RewardPool(section(default=name, workers=2))
    assert reason in str(error.value)
    assert worker_ids(os.getpid()) == before


def test_close_leaves_no_process_even_with_work_under_way() -> None:
    before = worker_ids(os.getpid())
    pool = RewardPool(section(workers=3, timeout_seconds=100.0))
    submit(pool, "hang", "hang", "1", "1", "hang", "1")
    assert len(worker_ids(os.getpid()) - before) == 3
    started = time.monotonic()
    pool.close()
    assert worker_ids(os.getpid()) == before
    assert time.monotonic() - started < 5.0
    pool.close()


PARENT = """
import os, sys, time
from grpo_megatron.batch import Prompt, RewardSpec, Rollout
from grpo_megatron.config.schema import RewardsSection
from grpo_megatron.rewards.pool import RewardPool

assert os.environ["RANK"] == "3"
pool = RewardPool(RewardsSection(default="user_rewards:act", workers=2, timeout_seconds=100.0))
for index in range(2):
    prompt = Prompt("p", (1,), "", RewardSpec("user_rewards:act"))
    pool.submit(prompt, Rollout("p", index, (1,), (0.0,), "stop", (), "hang"))
print("ready", flush=True)
time.sleep(100)
"""


def test_workers_die_with_a_parent_that_is_killed_and_do_not_see_torchrun_variables() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RANK": "3", "WORLD_SIZE": "4"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        workers = worker_ids(parent.pid)
        assert len(workers) == 2
        for worker in workers:
            assert b"RANK=" not in Path(f"/proc/{worker}/environ").read_bytes()
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{worker}/cmdline").exists() and _is_ours(worker) for worker in workers):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.02)


def _is_ours(worker: int) -> bool:
    try:
        return b"grpo_megatron.rewards.worker" in Path(f"/proc/{worker}/cmdline").read_bytes()
    except OSError:
        return False


def test_one_reward_of_many_that_hangs_costs_its_own_score_only() -> None:
    with RewardPool(section(workers=2, timeout_seconds=0.8)) as pool:
        submit(pool, *("0.5" if index != 17 else "hang" for index in range(64)))
        results = pool.collect(60)
        assert pool.stats().errors == {"timeout": 1}
    assert [results["p", index].score for index in range(64)] == [0.5 if index != 17 else 0.0 for index in range(64)]
