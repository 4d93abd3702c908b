"""The resolved configuration as text loads back to the same configuration."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import yaml

from grpo_megatron.config.loader import load_config
from grpo_megatron.config.resolved import fingerprint, to_yaml
from grpo_megatron.config.schema import Config, RunSection
from grpo_megatron.config.yaml_tree import parse_yaml, write_yaml
from tests.config.test_loader import SEED
from tests.config.writing import load_text

pytestmark = pytest.mark.unit

TRICKY = [
    "modules.training.learning_rate=3.3e-7",
    "modules.training.adam_epsilon=1e-15",
    "modules.rollout.stop_token_ids=[2, 7]",
    "data.prompts=['1e-6', 'yes', '007', 'a: b', '# x', '']",
    'data.system_message="two\\nlines, \u201cquoted\u201d \u2014 and \\ttabs"',
    "model.policy='~'",
    "megatron={moe_router_topk: 1, recompute_modules: [mlp], softmax_scale: null}",
    "run.resume=7",
    "run.name='1.5'",
]


def test_the_resolved_text_loads_to_an_equal_configuration(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, SEED.read_text(), *TRICKY)
    again = load_text(tmp_path, to_yaml(loaded.config))
    assert again.config == loaded.config
    assert to_yaml(again.config) == to_yaml(loaded.config)


def test_other_yaml_readers_see_the_same_values(tmp_path: Path) -> None:
    loaded = load_text(tmp_path, "{}", *TRICKY)
    read = yaml.safe_load(to_yaml(loaded.config))
    assert read["modules"]["training"]["learning_rate"] == 3.3e-7
    assert read["data"]["prompts"] == ["1e-6", "yes", "007", "a: b", "# x", ""]
    assert read["run"]["name"] == "1.5"


def test_the_run_keeps_its_name_when_the_resolved_file_has_another(tmp_path: Path) -> None:
    config = load_config(SEED).config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml").config.run.name == "seed"


WORDS = [
    "yes",
    "no",
    "null",
    "~",
    "true",
    "1e-6",
    ".inf",
    "0x1f",
    "12:30",
    "2024-01-01",
    "<<",
    "=",
    "-",
    "''",
    " a",
    "",
]
SIGNS = "-+.0123456789eE_xo:'\"#&*!{}[],|>%@` \n\t\\\u00e9\u2014\u201c\u4e2d\U0001f600"


def _random_value(random: Random) -> object:
    match random.randrange(7):
        case 0:
            return random.choice([None, True, False])
        case 1:
            return random.randrange(-(10**20), 10**20)
        case 2:
            return random.uniform(-1, 1) * 10.0 ** random.randrange(-300, 300)
        case 3:
            return random.choice(WORDS)
        case 4:
            return [_random_value(random) for _ in range(random.randrange(3))]
        case _:
            return "".join(random.choices(SIGNS, k=random.randrange(6)))


def test_any_plain_values_survive_writing_and_reading() -> None:
    random = Random(0)
    for _ in range(300):
        values = {name: _random_value(random) for name in "abcdef"}
        tree = parse_yaml(write_yaml(values), file="x.yaml")
        assert tree.problems == []
        assert tree.value == values


def test_the_fingerprint_follows_the_values() -> None:
    config = Config()
    assert fingerprint(config) == fingerprint(Config())
    assert len(fingerprint(config)) == 64
    assert fingerprint(config) != fingerprint(replace(config, run=RunSection(seed=1)))
