"""What loads: the user's file, YAML's shapes, numbers, overrides and their order, origins."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_megatron.config.loader import load_config
from grpo_megatron.config.schema import Config
from tests.config.writing import NAME, load_text

pytestmark = pytest.mark.unit

SEED = Path(__file__).parents[2] / "examples" / "seed.yaml"


def test_the_seed_file_loads_as_it_is() -> None:
    loaded = load_config(SEED)
    config = loaded.config
    assert config.schedule_mode == "async"
    assert config.modules.rollout.engine == "vllm"
    assert (config.modules.rollout.mtp_enabled, config.modules.rollout.batch_size) == (True, 16)
    assert config.modules.inference.models == ("reward_model", "reference_model")
    assert config.modules.training.update_strategy == "grpo"
    assert config.memory_management.dynamic_offload
    assert config.memory_management.offload_trigger_threshold == 0.85
    assert config.modules.rollout.group_size == Config().modules.rollout.group_size
    assert config.run.name == "seed"
    assert str(loaded.origins["modules.rollout.batch_size"]) == f"{SEED}:7"
    assert str(loaded.origins["run.steps"]) == "default"


@pytest.mark.parametrize("name", ["megatron", "sglang", "vllm"])
def test_an_engine_is_the_same_with_and_without_its_ending(tmp_path: Path, name: str) -> None:
    with_ending = load_text(tmp_path, f"modules: {{rollout: {{engine: {name}_engine}}}}")
    assert with_ending.config == load_text(tmp_path, "{}", f"modules.rollout.engine={name}").config
    assert with_ending.config.modules.rollout.engine == name


@pytest.mark.parametrize("written", ["1e-6", "1E-6", "1.0e-6", "+1e-6", "1.e-6", "0.000001", "10e-7"])
def test_numbers_with_exponents_are_numbers_in_file_and_override(tmp_path: Path, written: str) -> None:
    in_file = load_text(tmp_path, f"modules:\n  training:\n    learning_rate: {written}\n")
    overridden = load_text(tmp_path, "run: {seed: 0}", f"modules.training.learning_rate={written}")
    assert in_file.config.modules.training.learning_rate == 1e-6
    assert overridden.config.modules.training.learning_rate == 1e-6


def test_a_whole_number_is_good_enough_for_a_number(tmp_path: Path) -> None:
    temperature = load_text(tmp_path, "modules: {rollout: {temperature: 2}}").config.modules.rollout.temperature
    assert temperature == 2.0 and isinstance(temperature, float)


def test_words_of_yaml_1_1_stay_text(tmp_path: Path) -> None:
    for word in ("on", "no", "12:30", "2024-01-01", "1.2.3", "0x", "1e", "e5"):
        assert load_text(tmp_path, f"run: {{name: '{word}'}}").config.run.name == word
        assert load_text(tmp_path, f"run:\n  name: {word}\n").config.run.name == word


def test_a_single_text_is_a_list_of_one(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, "data:\n  prompts: a.jsonl\nmodules: {inference: {models: reference_model}}")
    assert loaded.config.data.prompts == ("a.jsonl",)
    assert loaded.config.modules.inference.models == ("reference_model",)


def test_an_empty_section_takes_its_defaults(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, "run:\nmodules:\n  rollout:\nmegatron:\n")
    assert loaded.config.modules == Config().modules
    assert loaded.config.megatron == {}


def test_text_in_quotes_or_blocks_may_hold_any_character(tmp_path: Path) -> None:
    text = (
        "data:\n"
        '  system_message: "Don\u2019t guess \u2014 say \u201cno\u201d"  # it\u2019s fine\n'
        "sglang: {}\n"
        "model:\n"
        "  policy: /m\u00fcller/l\u2019amour\n"
        "run:\n"
        "  folder: |-\n"
        "    \u201ca\u201d\tb\n"
        "  name: 'it''s'\n"
    )
    config = load_text(tmp_path, text).config
    assert config.data.system_message == "Don\u2019t guess \u2014 say \u201cno\u201d"
    assert config.model.policy == "/m\u00fcller/l\u2019amour"
    assert config.run.folder == "\u201ca\u201d\tb"
    assert config.run.name == "it's"


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"\xef\xbb\xbfrun:\r\n  steps: 7\r\n")
    loaded = load_config(tmp_path / NAME)
    assert loaded.config.run.steps == 7
    assert loaded.origins["run.steps"].line == 2


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, "run:\n  steps: 1\n  seed: 1\n", "run.steps=2", "run.steps=3")
    assert (loaded.config.run.steps, loaded.config.run.seed) == (3, 1)
    assert str(loaded.origins["run.steps"]) == "command line"
    assert str(loaded.origins["run.seed"]) == f"{tmp_path / NAME}:3"


def test_lists_replace_and_sections_merge(tmp_path: Path) -> None:
    text = "data:\n  prompts: [a.jsonl, b.jsonl]\n  shuffle: false\nmegatron:\n  qk_clip: true\n"
    loaded = load_text(tmp_path, text, "data={prompts: [c.jsonl]}", "megatron={moe_router_topk: 1}")
    assert loaded.config.data.prompts == ("c.jsonl",)
    assert loaded.config.data.shuffle is False
    assert loaded.config.megatron == {"qk_clip": True, "moe_router_topk": 1}
    assert str(loaded.origins["megatron.moe_router_topk"]) == "command line"
    assert str(loaded.origins["megatron.qk_clip"]) == f"{tmp_path / NAME}:5"


def test_an_override_may_hold_an_equals_sign_and_take_a_value_back(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, "model: {policy: /a}", "model.policy=/b=c", "data.system_message='x = y'", "run.name=")
    assert loaded.config.model.policy == "/b=c"
    assert loaded.config.data.system_message == "x = y"
    assert loaded.config.run.name == "grpo"


def test_an_override_mends_what_is_wrong_in_the_file(tmp_path: Path) -> None:
    assert load_text(tmp_path, "run:\n  steps: ten\n", "run.steps=10").config.run.steps == 10


def test_every_key_has_an_origin(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, "run: {seed: 0}")
    assert {"model.policy", "modules.training.kl.coefficient", "monitor.wandb", "vllm"} <= set(loaded.origins)


def test_no_deep_learning_library_is_imported() -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import grpo_megatron.config.loader, grpo_megatron.config.availability, grpo_megatron.config.resolved\n"
        f"grpo_megatron.config.loader.load_config(Path({str(SEED)!r}), ['megatron.qk_clip=true'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'megatron', 'megatron.core'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=SEED.parents[1], timeout=60
    )
    assert result.returncode == 0, result.stderr
