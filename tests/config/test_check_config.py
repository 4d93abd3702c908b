"""tools/check_config.py as a user calls it: what it prints, how it exits, how long it takes."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo_megatron.config import availability
from grpo_megatron.config.sglang_package import SglangPackage
from tools import check_config
from tools.check_config import main

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class Answer:
    code: int
    output: str
    errors: str


Check = Callable[..., Answer]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Check:
    """Calls the tool in this process: what it prints and its exit code."""
    monkeypatch.chdir(ROOT)

    def call(*arguments: str) -> Answer:
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = int(str(end.code))
        printed = capsys.readouterr()
        return Answer(code, printed.out, printed.err)

    return call


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A configuration that can run, with a model of 134,515,008 parameters (its weights are not read here)."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA))
    (model / "model.safetensors").write_bytes(b"x")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "3 + 5 =", "answer": "8"}\n')
    file = tmp_path / "grpo.yaml"
    sections = f"model:\n  policy: {model}\ndata:\n  prompts: {tmp_path / 'prompts.jsonl'}\n"
    file.write_text(sections + "modules:\n  rollout:\n    engine: megatron\n")
    return file


def test_a_configuration_that_can_run_is_explained_and_exits_0(check: Check, ready: Path) -> None:
    result = check(str(ready), "parallel.tensor=3", "parallel.pipeline=2", "--world-size", "12", "run.steps=7")
    assert (result.code, result.errors) == (0, "")
    lines = [line.strip() for line in result.output.splitlines()]
    words = {tuple(line.split()) for line in lines}
    assert ("*", "run.steps", "7", "command", "line") in words
    assert ("*", "model.policy", str(ready.parent / "model"), f"{ready}:2") in words
    assert ("run.seed", "0", "default") in words
    assert "ranks: 12 = tensor 3 x pipeline 2 x data 2" in lines
    assert ("rank", "11", "tensor", "2", "pipeline", "1", "data", "1") in words
    assert "batch: 16 prompts x 16 answers = 256 rollouts a step" in lines
    assert "1 mini-batch of 256 rollouts, 128 for each of 2 replicas" in lines
    assert "the run: 7 steps, 112 prompts, 1792 rollouts" in lines
    assert "model: llama, 134,515,008 parameters, bfloat16" in lines
    # 15 layers of (576 * 960 + 576 * 576 + 3 * 576 * 1536) / 3 + 1152, and a third of the embedding.
    first_stage = 15 * ((576 * 960 + 576 * 576 + 3 * 576 * 1536) // 3 + 1152) + 49152 * 576 // 3
    total = first_stage * (2 + 4) + first_stage // 2 * 12
    assert f"each rank of stage 0: {first_stage:,} parameters, {total / 1e6:.3g} MB together" in lines
    assert any(line.startswith("1 rollout  needs policy_parameters") for line in lines)
    assert lines[-1] == "fine: this can start"


def test_the_answer_comes_in_under_two_seconds_and_without_torch(ready: Path) -> None:
    code = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_path('tools/check_config.py', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    heavy = {'torch', 'transformers', 'megatron', 'numpy'} & set(sys.modules)\n"
        "    sys.exit(f'imported: {heavy}' if heavy else end.code)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(ready), "megatron.qk_clip_threshold=50"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    # Processor seconds: on a busy machine the clock on the wall counts what others do.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_the_seed_file_is_explained_and_refused_with_exit_1(check: Check) -> None:
    result = check("examples/seed.yaml", "--world-size", "2")
    assert result.code == 1
    assert "examples/seed.yaml:5: modules.rollout.engine: the engine vllm is not there yet\n" in result.errors
    assert result.errors.endswith("refused: 7 things to change\n")
    assert "batch: 16 prompts x 16 answers = 256 rollouts a step" in result.output


def test_engines_in_processes_of_their_own_are_explained(
    check: Check, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ready.parent / "sglang"
    package.mkdir()
    (package / "_version.py").write_text("__version__ = '9.8.7'\n")
    for place in (check_config, availability):
        monkeypatch.setattr(place, "find_sglang", lambda python: SglangPackage(package))
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(12)))
    settings = ["modules.rollout.engine=sglang", "modules.rollout.tensor=2", "modules.rollout.max_engine_restarts=1"]
    settings += ["modules.rollout.max_concurrent_rollouts=10", "modules.rollout.publish_bucket_bytes=1000000"]
    result = check(str(ready), *settings, "--world-size", "8", "--ranks-per-machine", "4")
    assert (result.code, result.errors) == (0, "")
    lines = [line.strip() for line in result.output.splitlines()]
    assert "engines: 2 on a machine, tensor 2, sglang 9.8.7" in lines
    # 134,515,008 numbers of two bytes on two ranks; 10 x (1024 + 512) + 64 tokens, each with a key and a value in
    # 30 layers: one of three heads of 64 numbers of two bytes.
    cache = (10 * 1536 + 64) * 2 * 30 * 1 * 64 * 2
    assert f"each rank of an engine: 3 threads of this machine's 12 cores, weights {134_515_008 / 1e6:.3g} MB," in lines
    assert f"keys and values {cache / 1e6:.3g} MB" in lines
    room = "each engine: 10 answers at once, room for at most 15,424 tokens (longest prompt and answer 1536)"
    assert room in lines
    assert "silent for 60 s and no answer to a probe: it hangs; 1 restart in a run" in lines
    assert "a publish sends pieces of at most 1 MB" in lines
    assert any(line.startswith("1 rollout  needs engine_weights 135 MB, kv_cache 118 MB") for line in lines)
    assert any(line.startswith("4 publish  needs policy_parameters 269 MB, engine_weights 135 MB") for line in lines)


def test_engines_that_do_not_fit_on_a_machine_are_refused(
    check: Check, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(availability, "find_sglang", lambda python: SglangPackage(ready))
    settings = ["modules.rollout.engine=sglang", "modules.rollout.tensor=4"]
    result = check(str(ready), *settings, "--world-size", "4", "--ranks-per-machine", "2")
    assert result.code == 1
    assert "engines of 4 ranks cannot share the 2 ranks of a machine" in result.errors


def test_mistakes_are_listed_with_exit_1(check: Check, tmp_path: Path) -> None:
    file = tmp_path / "typo.yaml"
    file.write_text("run:\n  stepz: 5\nmodel:\n  dtype: half\n")
    result = check(str(file))
    assert result.code == 1
    assert result.errors == (
        f"{file}:2: run.stepz: unknown key\n"
        "  fix: did you mean run.steps?\n"
        f"{file}:4: model.dtype: 'half' is not known; expected one of: bfloat16, float32\n"
        "\nrefused: 2 things to change\n"
    )


def test_what_the_model_cannot_do_is_refused(check: Check, ready: Path) -> None:
    long = check(str(ready), "modules.rollout.max_new_tokens=2000")
    assert long.code == 1 and "1024 + 2000 = 3024 tokens" in long.errors
    heads = check(str(ready), "parallel.tensor=2", "--world-size", "2")
    assert heads.code == 1 and "parallel.tensor: 2 does not fit this model" in heads.errors
    layers = check(str(ready), "parallel.pipeline=4", "--world-size", "4")
    assert layers.code == 1 and "parallel.pipeline: 30 layers do not divide" in layers.errors


def test_a_model_of_an_unknown_kind_is_refused(check: Check, ready: Path) -> None:
    (ready.parent / "model" / "config.json").write_text('{"model_type": "rwkv"}')
    result = check(str(ready))
    assert result.code == 1
    assert f"{ready}:2: model.policy: " in result.errors and "'rwkv' is not known" in result.errors
    assert "Traceback" not in result.errors


@pytest.mark.parametrize("arguments", [[], ["x.yaml", "--world-size", "none"], ["x.yaml", "--world-size", "0"],
                                       ["x.yaml", "--wat"], ["x.yaml", "--ranks-per-machine", "none"]])  # fmt: skip
def test_wrong_usage_exits_2(check: Check, arguments: list[str]) -> None:
    result = check(*arguments)
    assert result.code == 2
    assert "usage: check_config.py FILE" in result.errors


def test_overrides_may_stand_on_both_sides_of_an_option(check: Check, ready: Path) -> None:
    result = check(str(ready), "run.seed=1", "--world-size", "2", "run.steps=2")
    assert result.code == 0
    assert result.output.count("command line") == 2
