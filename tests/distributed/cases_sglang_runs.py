"""Whole runs on real SGLang engines: layouts unlike the trainer's, a policy that stands still, and every death."""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from grpo_megatron.rollout.sglang.engine import SglangEngine
from grpo_megatron.rollout.sglang.process import EngineProcess
from grpo_megatron.rollout.sglang.sink import SglangSink
from tests.distributed.cases_runs import _run, _steps
from tests.distributed.harness import CaseContext, case

SGLANG = [
    "modules.rollout.engine=sglang",
    "run.deterministic=false",
    "checkpoint.every_steps=0",
    "checkpoint.export_at_end=false",
    "run.phase_deadline_seconds=280",
]


@dataclass(frozen=True)
class Death:
    """What happens to the engine of a rank, once."""

    rank: int
    during: Literal["generation", "publish"]
    version: int
    """Generation with this version, or publish of it."""
    victim: Literal["server", "scheduler"] = "server"
    by: signal.Signals = signal.SIGKILL


def _strike(death: Death, process: EngineProcess) -> None:
    victim = psutil.Process(process.process_id)
    if death.victim == "scheduler":
        victim = next(child for child in victim.children(recursive=True) if "scheduler" in " ".join(child.cmdline()))
    os.kill(victim.pid, death.by)


@contextmanager
def _deaths(deaths: list[Death], rank: int, process: Callable[[], EngineProcess]) -> Iterator[list[Death]]:
    """Strike at the first answer that ends with a version, and after the first bucket of a publish."""
    happened: list[Death] = []
    open_ = [death for death in deaths if death.rank == rank]
    rollout, put = SglangEngine._rollout, SglangSink.put

    def strike(during: str, version: int, engine_process: EngineProcess) -> None:
        for death in open_:
            if (death.during, death.version) == (during, version) and death not in happened:
                happened.append(death)
                _strike(death, engine_process)

    def dying_rollout(self: SglangEngine, work: Any, answer: Any) -> Any:
        made = rollout(self, work, answer)
        assert self.life is not None
        strike("generation", made.versions[0].version, self.life.process)
        return made

    def dying_put(self: SglangSink, bucket: Any) -> None:
        put(self, bucket)
        strike("publish", self._next, process())

    SglangEngine._rollout, SglangSink.put = dying_rollout, dying_put  # type: ignore[method-assign]
    try:
        yield happened
    finally:
        SglangEngine._rollout, SglangSink.put = rollout, put  # type: ignore[method-assign]


def _check_ledger(folder: Path, *, num_steps: int, num_rollouts: int) -> None:
    """Every answer that was asked for is accounted for exactly once."""
    files = sorted((folder / "ledger").iterdir())
    assert len(files) == num_steps
    for file in files:
        seen: Counter[tuple[str, int]] = Counter()
        for line in map(json.loads, file.open()):
            for index in [*line["trained"], *(index for each in line["dropped"].values() for index in each)]:
                seen[line["prompt_id"], index] += 1
        assert len(seen) == num_rollouts and set(seen.values()) == {1}, (file.name, seen)


@case(world_size=2, with_engines=True)
def a_run_survives_every_death_of_its_engines(context: CaseContext) -> None:
    """Scheduler and server killed, server stopped, while it generates and while it gets weights: cases E1 and W4.

    With everything offloaded that a phase does not need: the policy comes back to be published in the middle of a
    rollout.
    """
    deaths = [
        Death(rank=0, during="generation", version=0, victim="scheduler"),
        Death(rank=1, during="generation", version=1),
        Death(rank=0, during="generation", version=2, by=signal.SIGSTOP),
        Death(rank=1, during="publish", version=3),
        Death(rank=0, during="publish", version=4, by=signal.SIGSTOP),
    ]
    made: list[EngineProcess] = []
    original = EngineProcess.__init__

    def remember(self: EngineProcess, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        made.append(self)

    EngineProcess.__init__ = remember  # type: ignore[method-assign]
    try:
        with _deaths(deaths, context.rank, lambda: made[-1]) as happened:
            settings = ["run.steps=6", "modules.rollout.max_new_tokens=40", "modules.rollout.engine_stall_seconds=6"]
            settings += ["modules.rollout.max_engine_restarts=9", "memory_management.dynamic_offload=true"]
            settings += ["memory_management.offload_trigger_threshold=0"]
            code, folder = _run(context, "dying", *SGLANG, *settings)
    finally:
        EngineProcess.__init__ = original  # type: ignore[method-assign]
    mine = [death for death in deaths if death.rank == context.rank]
    assert happened == mine, (happened, mine)
    assert len(made) == 1 + len(mine)
    assert code == 0
    steps = _steps(folder)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        assert step["gap/max"] < 1e-4, step  # every answer was sampled from the weights of its step
    _check_ledger(folder, num_steps=6, num_rollouts=16)
    log = (folder / "logs" / f"rank-{context.rank}.log").read_text()
    assert len(re.findall(r"engine was lost .*restart \d of 9", log)) == len(mine)
    assert not [one for one in made if one.is_running or Path(one._folder).exists()]


@case(world_size=2, with_engines=True)
def engines_of_one_rank_serve_a_tensor_parallel_trainer_that_stands_still(context: CaseContext) -> None:
    """Case E3: learning rate 0 for 20 steps, published 21 times: the train-rollout difference stays where it was."""
    settings = ["parallel.tensor=2", "modules.rollout.tensor=1", "run.steps=20", "modules.training.learning_rate=0"]
    code, folder = _run(context, "still", *SGLANG, *settings)
    assert code == 0
    steps = _steps(folder)
    assert len(steps) == 20
    gaps = [step["gap/max"] for step in steps]
    assert max(gaps) < 1e-5, gaps
    assert max(gaps) < 10 * max(min(gaps), 1e-8), gaps
    assert all(step["policy/ratio_max"] == 1.0 for step in steps if step["groups/trained_rollouts"])
    _check_ledger(folder, num_steps=20, num_rollouts=16)


@case(world_size=2, with_engines=True)
def one_engine_of_two_ranks_serves_two_trainers(context: CaseContext) -> None:
    """Data parallel in training, tensor parallel in rollout; the second rank has no engine to talk to."""
    settings = ["modules.rollout.tensor=2", "run.steps=3", "modules.training.learning_rate=1e-2"]
    code, folder = _run(context, "wide", *SGLANG, *settings)
    assert code == 0
    steps = _steps(folder)
    assert max(step["gap/max"] for step in steps) < 1e-4, steps
    assert all(step["num_rollouts"] == 16 for step in steps) if "num_rollouts" in steps[0] else True
    _check_ledger(folder, num_steps=3, num_rollouts=16)
    assert sorted(path.name for path in (folder / "logs").glob("engine-*.log")) == ["engine-0.log"]
