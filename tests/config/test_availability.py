"""What a right configuration lacks before it can run: named, with the line to add or change."""

from pathlib import Path

import pytest

from grpo_megatron.config import availability
from grpo_megatron.config.availability import NOT_YET, find_refusals
from grpo_megatron.config.loader import load_config
from grpo_megatron.config.model_fit import find_misfits
from grpo_megatron.config.problems import Problem
from grpo_megatron.config.schema import Config
from grpo_megatron.config.sglang_package import INSTALL, SglangPackage
from tests.config.test_loader import SEED
from tests.config.writing import NAME, load_text

pytestmark = pytest.mark.unit


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A folder with what a run needs."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"x")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "3 + 5 =", "answer": "8"}\n')
    return tmp_path


@pytest.fixture
def with_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where SGLang is installed."""
    monkeypatch.setattr(availability, "find_sglang", lambda python: SglangPackage(Path("sglang")))


def refusals(folder: Path, *overrides: str, text: str = "run: {seed: 0}", world_size: int | None = 2) -> list[Problem]:
    filled = [f"model.policy={folder / 'model'}", f"data.prompts={folder / 'prompts.jsonl'}"]
    filled += ["modules.rollout.engine=megatron"] if "engine" not in text else []
    loaded = load_text(folder, text, *filled, *overrides)
    return find_refusals(loaded.config, world_size=world_size, origins=loaded.origins)


def only_refusal(folder: Path, *overrides: str, **settings: object) -> Problem:
    found = refusals(folder, *overrides, **settings)  # type: ignore[arg-type]
    assert len(found) == 1, found
    return found[0]


def test_a_complete_configuration_is_not_refused(ready: Path) -> None:
    assert refusals(ready) == []
    assert refusals(ready, "run.deterministic=true", "memory_management.dynamic_offload=true",
                    "memory_management.offload_trigger_threshold=0") == []  # fmt: skip


def test_the_seed_file_is_refused_by_name_line_by_line() -> None:
    loaded = load_config(SEED)
    found = find_refusals(loaded.config, world_size=2, origins=loaded.origins)
    assert [(problem.line, problem.key) for problem in found] == [
        (2, "schedule_mode"),
        (5, "modules.rollout.engine"),
        (6, "modules.rollout.mtp_enabled"),
        (9, "modules.inference.models"),
        (14, "memory_management.offload_trigger_threshold"),
        (None, "model.policy"),
        (None, "data.prompts"),
    ]
    assert "line 5 becomes  engine: sglang" in found[1].fix
    assert "line 9 becomes  models: [reference_model]" in found[3].fix
    assert "model:\n    policy: /path/to/hf_folder" in found[5].fix
    assert "data.prompts=[/path/to/prompts.jsonl]" in found[6].fix


def test_following_the_advice_makes_the_seed_file_run(ready: Path, with_sglang: None) -> None:
    advice = [
        "schedule_mode=sync",
        "modules.rollout.engine=sglang",
        "modules.rollout.mtp_enabled=false",
        "modules.inference.models=[reference_model]",
        "memory_management.offload_trigger_threshold=0",
    ]
    assert refusals(ready, *advice, text=SEED.read_text()) == []


@pytest.mark.parametrize(
    ("override", "key", "named", "advice"),
    [
        ("modules.rollout.engine=vllm", "modules.rollout.engine", "the engine vllm", "engine=sglang"),
        ("schedule_mode=async", "schedule_mode", "the schedule async", "schedule_mode=sync"),
        ("modules.rollout.mtp_enabled=true", "modules.rollout.mtp_enabled", "multi-token", "mtp_enabled=false"),
        ("model.drafter=/d", "model.drafter", "a drafter", "model.drafter=null"),
        ("modules.inference.models=[reward_model]", "modules.inference.models", "reward_model", "models=[]"),
        ("parallel.context=2", "parallel.context", "context parallelism", "parallel.context=1"),
        ("parallel.expert=2", "parallel.expert", "expert parallelism", "parallel.expert=1"),
        ("memory_management.dynamic_offload=true", "memory_management.offload_trigger_threshold", "threshold", "=0"),
        ("monitor.wandb=true", "monitor.wandb", "wandb", "monitor.wandb=false"),
    ],
)
def test_what_is_not_there_yet_is_named_with_what_works(
    ready: Path, override: str, key: str, named: str, advice: str
) -> None:
    problem = only_refusal(ready, override)
    assert problem.key == key
    assert named in problem.message and "is not there yet" in problem.message
    assert advice in problem.fix


def test_virtual_pipelining_is_not_there_yet(ready: Path) -> None:
    found = refusals(ready, "parallel.pipeline=2", "parallel.virtual_pipeline=2")
    assert [problem.key for problem in found] == ["parallel.virtual_pipeline"]


def test_the_defaults_ask_for_nothing_that_is_not_there() -> None:
    assert [row.key for row in NOT_YET if row.asked_for(Config())] == []


def test_the_line_to_add_goes_below_a_section_that_is_there(ready: Path) -> None:
    text = "run: {seed: 0}\nmodel:\n  dtype: float32\n"
    loaded = load_text(ready, text)
    problem = find_refusals(loaded.config, world_size=None, origins=loaded.origins)[0]
    assert problem.fix.startswith("add below line 2 (model:)\n  policy: /path/to/hf_folder\n")


def test_models_that_cannot_be_read_are_refused_with_the_reason(ready: Path) -> None:
    empty, nested = ready / "empty", ready / "nested"
    empty.mkdir()
    (nested / "inner").mkdir(parents=True)
    (nested / "inner" / "config.json").write_text("{}")
    (ready / "model" / "model.safetensors").unlink()
    cases = {
        str(ready / "model"): "there are no *.safetensors",
        str(empty): "is empty",
        str(nested): "there is no config.json",
        str(ready / "prompts.jsonl"): "is a file; expected a folder",
        str(ready / "gone"): "gone is not there",
        "Org/Model-1B": "Org/Model-1B is not there",
        "~/no-such-model": "~/no-such-model is not there",
        "tests/no-such-model": "tests/no-such-model is not there",
        "''": "is empty",
    }
    found = {path: only_refusal(ready, f"model.policy={path}") for path in cases}
    for path, message in cases.items():
        assert found[path].key == "model.policy" and message in found[path].message
    assert f"did you mean {nested / 'inner'}?" == found[str(nested)].fix
    assert f"what exists of it is {ready}" in found[str(ready / "gone")].fix
    assert "nothing is downloaded here" in found["Org/Model-1B"].fix
    assert "downloaded" not in found["tests/no-such-model"].fix
    assert str(Path("~/no-such-model").expanduser()) in found["~/no-such-model"].fix


def test_a_reference_model_that_is_not_there_is_refused(ready: Path) -> None:
    problem = only_refusal(ready, "model.reference=/no/such", "modules.inference.models=reference_model")
    assert (problem.key, problem.message) == ("model.reference", "/no/such is not there")


def test_prompt_files_that_cannot_be_read_are_refused_with_the_reason(ready: Path) -> None:
    (ready / "empty.jsonl").write_text("")
    text = f"data:\n  evaluation:\n  - {ready / 'gone.jsonl'}\n  - {ready}\n  - {ready / 'empty.jsonl'}\n  - ''\n"
    found = refusals(ready, text=text)
    assert [problem.line for problem in found] == [3, 4, 5, 6]
    for problem, part in zip(found, ("is not there", "is a folder", "is empty", "an empty name"), strict=True):
        assert problem.key == "data.evaluation" and part in problem.message
    assert str(ready / "empty.jsonl") in found[1].fix  # the first by name


def test_deterministic_runs_need_the_embedded_engine_in_sync(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_megatron.config.availability.NOT_YET", ())
    found = refusals(ready, "run.deterministic=true", "modules.rollout.engine=vllm", "schedule_mode=async")
    assert [(problem.key, problem.message) for problem in found] == [
        ("run.deterministic", "needs modules.rollout.engine: megatron, it is vllm"),
        ("run.deterministic", "needs schedule_mode: sync, it is async"),
    ]


def test_ranks_that_do_not_divide_are_refused(ready: Path) -> None:
    sizes = ["parallel.tensor=2", "parallel.pipeline=2"]
    problem = only_refusal(ready, *sizes, world_size=6)
    assert problem.message == "6 ranks are no multiple of 4 (tensor 2 x pipeline 2)"
    assert "start 8 ranks" in problem.fix
    assert refusals(ready, *sizes, world_size=8) == []
    assert refusals(ready, *sizes, world_size=None) == []


def test_an_interpreter_that_is_not_there_is_refused(ready: Path) -> None:
    found = refusals(ready, "modules.rollout.engine=vllm", "modules.rollout.python=/no/python")
    assert [problem.key for problem in found] == ["modules.rollout.engine", "modules.rollout.python"]


def test_sglang_that_is_not_installed_is_refused_with_how_to_install_it(
    ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = SglangPackage(None, "SGLang is not installed for this Python", f"run  {INSTALL}")
    monkeypatch.setattr(availability, "find_sglang", lambda python: nowhere)
    text = f"model: {{policy: {ready / 'model'}}}\ndata: {{prompts: {ready / 'prompts.jsonl'}}}\n"
    loaded = load_text(ready, text)  # the default engine
    (problem,) = find_refusals(loaded.config, world_size=2, origins=loaded.origins)
    assert (problem.key, problem.line) == ("modules.rollout.engine", None)
    assert problem.message == "the engine sglang cannot start: SGLang is not installed for this Python"
    assert problem.fix.startswith(f"run  {INSTALL}\nor take the engine that needs no installation:\nadd to the file")
    assert problem.fix.endswith("or to the command  modules.rollout.engine=megatron")
    chosen = only_refusal(ready, text="modules:\n  rollout:\n    engine: sglang\n")
    assert chosen.line == 3 and "line 3 becomes  engine: megatron" in chosen.fix


def test_the_interpreter_without_sglang_is_refused(ready: Path) -> None:
    python = ready / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    problem = only_refusal(ready, "modules.rollout.engine=sglang", f"modules.rollout.python={python}")
    assert problem.key == "modules.rollout.python"
    assert f"cannot start: {python}, asked where its SGLang is, ended with exit code 3" in problem.message


def test_deterministic_runs_are_not_for_the_default_engine(ready: Path, with_sglang: None) -> None:
    problem = only_refusal(ready, text="run:\n  deterministic: true\nmodules: {rollout: {engine: sglang}}\n")
    assert (problem.line, problem.key) == (2, "run.deterministic")
    assert problem.message == "needs modules.rollout.engine: megatron, it is sglang"


def test_engines_of_their_own_must_divide_the_ranks_of_a_machine(ready: Path, with_sglang: None) -> None:
    text = "modules:\n  rollout:\n    engine: sglang\n    tensor: 3\n"
    problem = only_refusal(ready, text=text, world_size=4)
    assert (problem.line, problem.key) == (4, "modules.rollout.tensor")
    assert problem.message == "engines of 3 ranks cannot share the 4 ranks of a machine"
    assert problem.fix.startswith("possible here: 1, 2, 4\nline 4 becomes  tensor: 4")
    assert refusals(ready, text=text, world_size=6) == []
    assert refusals(ready, text=text, world_size=None) == []
    # Whatever the trainer's layout: engines of 1 and 4 beside a trainer of tensor 2 x pipeline 2.
    for size in (1, 4):
        layout = ["parallel.tensor=2", "parallel.pipeline=2", f"modules.rollout.tensor={size}"]
        assert refusals(ready, *layout, text="modules: {rollout: {engine: sglang}}", world_size=4) == []


def test_engines_do_not_span_machines(ready: Path, with_sglang: None) -> None:
    text = "modules: {rollout: {engine: sglang}}"
    filled = [f"model.policy={ready / 'model'}", f"data.prompts={ready / 'prompts.jsonl'}", "parallel.tensor=4"]
    loaded = load_text(ready, text, *filled)
    sizes = {"world_size": 8, "ranks_per_machine": 2}
    (problem,) = find_refusals(loaded.config, **sizes, origins=loaded.origins)
    assert problem.message == "engines of 4 ranks cannot share the 2 ranks of a machine"
    assert "modules.rollout.tensor=2" in problem.fix
    assert find_refusals(loaded.config, world_size=8, ranks_per_machine=4, origins=loaded.origins) == []
    assert [problem.key for problem in find_refusals(loaded.config, world_size=6, origins=loaded.origins)] == [
        "parallel.tensor"
    ]


def test_answers_longer_than_the_model_and_unknown_tokens_are_refused(tmp_path: Path) -> None:
    text = "modules:\n  rollout:\n    max_new_tokens: 600\n    stop_token_ids: [5, 99]\n"
    loaded = load_text(tmp_path, text, "data.max_prompt_tokens=500")
    found = find_misfits(loaded.config, max_positions=1024, vocab_size=99, origins=loaded.origins)
    assert [(problem.line, problem.key) for problem in found] == [
        (3, "modules.rollout.max_new_tokens"),
        (4, "modules.rollout.stop_token_ids"),
    ]
    assert "500 + 600 = 1100 tokens" in found[0].message and "by 76" in found[0].fix
    assert "99 is beyond the model's 99 tokens" in found[1].message
    assert find_misfits(loaded.config, max_positions=1100, vocab_size=100) == []


def test_refusals_name_the_file_without_a_line_where_a_key_has_its_default(ready: Path) -> None:
    loaded = load_text(ready, "run: {seed: 0}")
    found = find_refusals(loaded.config, world_size=None, origins=loaded.origins)
    assert {problem.file for problem in found} == {str(ready / NAME)}
