"""Whole runs on a tiny model, through the same `run_session` that `grpo_megatron.train` calls on every rank."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

from grpo_megatron.config.loader import load_config
from grpo_megatron.platform.environment import LaunchEnvironment
from grpo_megatron.scheduler.session import run_session
from tests.distributed.harness import CaseContext, case
from tests.tiny import make_tiny_llama

CONFIG = """
run: {steps: 4, seed: 1, deterministic: true, phase_deadline_seconds: 60}
model: {dtype: float32}
data: {apply_chat_template: false, max_prompt_tokens: 64}
modules:
  rollout: {engine: megatron, batch_size: 4, group_size: 4, max_new_tokens: 6}
  rewards: {default: "tests.distributed.judges:share_of_digits"}
  training: {learning_rate: 1e-3}
checkpoint: {every_steps: 2}
monitor: {tensorboard: false, save_rollouts_every_steps: 1}
"""


def _run(context: CaseContext, name: str, *overrides: str) -> tuple[int, Path]:
    """One run in this case's folder; returns its exit code and folder."""
    model, prompts, config = (context.shared_folder / part for part in ("run-model", "prompts.jsonl", "run.yaml"))
    if context.rank == 0 and not config.exists():
        make_tiny_llama(model)
        prompts.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(12)))
        config.write_text(CONFIG)
    dist.barrier()
    settings = [f"run.name={name}", f"run.folder={context.folder}", f"model.policy={model}", f"data.prompts={prompts}"]
    launch = LaunchEnvironment(context.rank, context.world_size, context.rank, context.world_size, "127.0.0.1", 0)
    code = run_session(load_config(config, [*settings, *overrides]), launch)
    dist.barrier()
    return code, context.folder / name


def _steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def _numbers(folder: Path) -> list[dict[str, float]]:
    """What a step computed, without what it took: equal to the bit between runs that should be the same."""
    return [
        {name: value for name, value in step.items() if not name.startswith(("seconds", "speed/", "time", "num_steps"))}
        for step in _steps(folder)
    ]


def _exported(folder: Path) -> dict[str, Any]:
    return load_file(max((folder / "exports").iterdir()) / "model.safetensors")


def _assert_same_weights(one: Path, other: Path) -> None:
    first, second = _exported(one), _exported(other)
    assert first.keys() == second.keys()
    different = [name for name in first if not first[name].equal(second[name])]
    assert not different, different


def _check_gap_and_ratio(folder: Path) -> None:
    trained = [step for step in _steps(folder) if step["groups/trained_rollouts"]]
    assert trained
    for step in trained:
        assert step["gap/max"] < 1e-4, step
        assert step["policy/ratio_max"] == 1.0 and step["policy/ratio_mean"] == 1.0, step


@case(world_size=2)
def the_reward_rises(context: CaseContext) -> None:
    """20 steps from about 0.15; a wrong sign, a wrong mask or a stale engine would not get there."""
    settings = ["run.steps=20", "modules.training.learning_rate=5e-3", "checkpoint.every_steps=0"]
    code, folder = _run(context, "rises", *settings)
    assert code == 0
    rewards = [step["reward/score_mean"] for step in _steps(folder)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards
    _check_gap_and_ratio(folder)


@case(world_size=2)
def offloading_everything_changes_no_bit(context: CaseContext) -> None:
    """Moving all groups at every phase border against moving none, with a reference model and two mini-batches."""
    models = ["modules.inference.models=[reference_model]", "modules.training.kl.coefficient=0.1"]
    models += ["modules.training.num_mini_batches=2", "model.dtype=bfloat16"]
    _, stays = _run(context, "stays", *models)
    away = ["memory_management.dynamic_offload=true", "memory_management.offload_trigger_threshold=0"]
    code, moves = _run(context, "moves", *models, *away)
    assert code == 0
    assert _numbers(stays) == _numbers(moves)
    _assert_same_weights(stays, moves)
    assert not list((moves / "offload").rglob("*.bin")), "files of the far tier are left behind"


@case(world_size=2)
def a_resumed_run_goes_on_bit_by_bit(context: CaseContext) -> None:
    """Stopped after step 3 and resumed, against never stopped: the next three steps and the final weights."""
    _, whole = _run(context, "whole", "run.steps=6", "checkpoint.every_steps=3")
    _run(context, "resumed", "run.steps=3")
    code, resumed = _run(context, "resumed", "run.steps=6")
    assert code == 0
    assert _numbers(whole) == _numbers(resumed)
    _assert_same_weights(whole, resumed)
    trained = [json.loads(line) for path in sorted((resumed / "ledger").iterdir()) for line in path.open()]
    assert len(trained) == 24 and all(
        len(line["trained"]) + sum(map(len, line["dropped"].values())) == 4 for line in trained
    )


@case(world_size=2)
def work_after_the_last_valid_checkpoint_is_done_again(context: CaseContext) -> None:
    """Case C2: the newest version is damaged, so the one before it is taken, with the same result."""
    _, whole = _run(context, "whole", "run.steps=4")
    _run(context, "damaged", "run.steps=4")
    dist.barrier()
    if context.rank == 0:
        folder = context.folder / "damaged"
        shutil.rmtree(folder / "exports")
        files = (folder / "checkpoints" / "version-000004" / "model").glob("*.distcp")
        victim = max(files, key=lambda path: path.stat().st_size)
        with victim.open("r+b") as file:
            file.truncate(victim.stat().st_size // 2)
    dist.barrier()
    code, damaged = _run(context, "damaged", "run.steps=4")
    assert code == 0
    assert _numbers(whole) == _numbers(damaged)
    _assert_same_weights(whole, damaged)


@case(world_size=2)
def a_failing_reward_follows_its_policy(context: CaseContext) -> None:
    reward = "modules.rewards.default=tests.distributed.judges:always_raises"
    code, folder = _run(context, "zero", reward, "run.steps=1")
    (step,) = _steps(folder)
    assert code == 0
    assert step["reward/error_share"] == 1.0 and step["reward/score_mean"] == 0.0
    code, _ = _run(context, "fail", reward, "run.steps=1", "modules.rewards.on_error=fail")
    assert code == 3
    log = (context.folder / "fail" / "logs" / f"rank-{context.rank}.log").read_text()
    assert "the judge is ill" in log and "phase score of step 1" in log


@case(world_size=2)
def tensor_parallel_engine_and_trainer_agree(context: CaseContext) -> None:
    code, folder = _run(context, "tensor", "parallel.tensor=2", "parallel.sequence_parallel=true", "run.steps=2")
    assert code == 0
    _check_gap_and_ratio(folder)


@case(world_size=2)
def pipeline_parallel_engine_and_trainer_agree(context: CaseContext) -> None:
    code, folder = _run(context, "pipeline", "parallel.pipeline=2", "run.steps=2")
    assert code == 0
    _check_gap_and_ratio(folder)


@case(world_size=4)
def the_first_step_is_the_same_on_four_layouts(context: CaseContext) -> None:
    """Same draws, so the same rollouts (in float32), the same loss and gradient norm."""
    layouts = {
        "data": [],
        "tensor": ["parallel.tensor=2"],
        "pipeline": ["parallel.pipeline=2"],
        "both": ["parallel.tensor=2", "parallel.pipeline=2"],
    }
    results = {}
    for name, overrides in layouts.items():
        code, folder = _run(context, name, *overrides, "run.steps=1", "run.deterministic=false")
        assert code == 0
        _check_gap_and_ratio(folder)
        (step,) = _steps(folder)
        results[name] = step
    for name, step in results.items():
        for metric in ("loss/total", "optimizer/gradient_norm", "reward/score_mean", "policy/entropy"):
            assert math.isclose(step[metric], results["data"][metric], rel_tol=1e-5, abs_tol=1e-6), (name, metric)


@case(world_size=2)
def a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(context: CaseContext) -> None:
    _run(context, "lost", "run.steps=2")
    dist.barrier()
    if context.rank == 0:
        for manifest in (context.folder / "lost" / "checkpoints").glob("version-*/manifest.json"):
            manifest.unlink()
    dist.barrier()
    code, folder = _run(context, "lost", "run.steps=3")
    assert code == 1
    assert len(_steps(folder)) == 2, "the history of the lost run stays"
    assert "steps: 2" in (folder / "config.yaml").read_text(), "a refused start leaves the run's configuration alone"
