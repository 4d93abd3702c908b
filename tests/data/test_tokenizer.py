"""The adapter over an HF folder's tokenizer, on a tiny one: one token per printable character."""

import json
from pathlib import Path

import pytest

from grpo_megatron.config.schema import DataSection
from grpo_megatron.data.prompts import load_prompts
from grpo_megatron.data.tokenizer import HfTokenizer
from tests.tiny import write_tokenizer

pytestmark = pytest.mark.unit


def id_of(character: str) -> int:
    return ord(character) - 32 + 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, 151)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return tmp_path


def test_text_is_encoded_as_it_is_with_its_markup(folder: Path) -> None:
    tokenizer = HfTokenizer(folder)
    assert tokenizer.encode_text("7*8</s>") == [id_of("7"), id_of("*"), id_of("8"), 2]
    assert tokenizer.decode([id_of("5"), id_of("6"), 2]) == "56"
    assert tokenizer.decode_with_special_tokens([id_of("5"), 2]) == "5</s>"
    assert tokenizer.decode([id_of(" "), id_of("."), id_of(" ")]) == " . "


def test_a_chat_ends_where_the_policy_begins(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "7*8?", "answer": 56}\n')
    section = DataSection(prompts=(str(tmp_path / "p.jsonl"),))
    (prompt,) = load_prompts(section, HfTokenizer(folder), default_reward="number")
    assert prompt.text == "<user>7*8?</s><assistant>"
    assert prompt.token_ids == (*map(id_of, "<user>7*8?"), 2, *map(id_of, "<assistant>"))


def test_stop_tokens_come_from_the_generation_config_first(folder: Path) -> None:
    assert HfTokenizer(folder).stop_token_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert HfTokenizer(folder).stop_token_ids == (2, 5)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").unlink()
    assert HfTokenizer(folder).stop_token_ids == (2,)  # the tokenizer's own </s>


def test_a_folder_that_is_missing_or_has_no_tokenizer_is_refused_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model.policy: there is no folder"):
        HfTokenizer(tmp_path / "none")
    with pytest.raises(ValueError, match="model.reference: .* has no tokenizer"):
        HfTokenizer(tmp_path, key="model.reference")


def test_a_tokenizer_without_a_chat_template_says_so(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert not HfTokenizer(folder).has_chat_template
