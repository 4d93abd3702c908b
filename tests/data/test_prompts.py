"""Prompt files: what they may hold, and what a user is told about those that hold something else."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config.schema import DataSection
from grpo_megatron.data.prompts import EncodedChat, PromptSet, check_held_out, load_prompts
from grpo_megatron.data.rows import PromptFileError

pytestmark = pytest.mark.unit


class CharacterTokenizer:
    """One token per character."""

    def __init__(self, *, has_chat_template: bool = True) -> None:
        self.has_chat_template = has_chat_template

    def encode_text(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> EncodedChat:
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"
        return EncodedChat(text, tuple(self.encode_text(text)))


def write(folder: Path, *lines: Any, name: str = "add.jsonl") -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / name).write_text("\n".join(texts) + "\n", encoding="utf-8")
    return str(folder / name)


def load(*paths: str, tokenizer: CharacterTokenizer | None = None, **settings: Any) -> PromptSet:
    section = DataSection(prompts=paths, **{"apply_chat_template": False, **settings})
    return load_prompts(section, tokenizer or CharacterTokenizer(), default_reward="number")


def test_every_field_of_a_line_finds_its_place(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {
            "id": "add-3-5",
            "prompt": "3+5=",
            "answer": "8",
            "reward": "math",
            "source": "sums",
            "must_end": True,
            "n": 1,
        },
        {"prompt": "1+1=", "answer": 2},
    )
    first, second = load(path)
    assert (first.id, first.text, first.token_ids, first.source) == ("add-3-5", "3+5=", (51, 43, 53, 61), "sums")
    assert (first.reward.name, first.reward.answer) == ("math", "8")
    assert first.reward.arguments == {"must_end": True, "n": 1}
    assert (second.reward.name, second.reward.answer, second.reward.arguments) == ("number", 2, {})
    assert second.source == "add"  # the file's name
    assert load(path).reward_names == ("math", "number")


def test_an_id_is_made_from_what_the_line_says_and_not_from_where_it_stands(tmp_path: Path) -> None:
    one = {"prompt": "1+1=", "answer": 2}
    other = {"prompt": "1+2=", "answer": 3}
    forward = load(write(tmp_path, one, other))
    backward = load(write(tmp_path, other, '{"answer":  2, "prompt": "1+1="}', name="b.jsonl"))
    assert [prompt.id for prompt in forward] == [prompt.id for prompt in backward][::-1]
    assert len({prompt.id for prompt in forward}) == 2


def test_a_chat_is_rendered_with_and_without_a_system_message(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "7*8?", "answer": 56},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"},
                      {"role": "user", "content": "7*8?"}], "answer": 56},
    )  # fmt: skip
    plain = load(path, apply_chat_template=True)
    assert [prompt.text for prompt in plain] == [
        "<user>7*8?<assistant>",
        "<user>hi<assistant>ho<user>7*8?<assistant>",
    ]
    with_system = load(path, apply_chat_template=True, system_message="short")
    assert with_system.prompts[0].text == "<system>short<user>7*8?<assistant>"


def test_prompts_that_are_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "12345", "answer": 1}, {"prompt": "123456", "answer": 1})
    prompts = load(path, max_prompt_tokens=5)
    assert [prompt.text for prompt in prompts] == ["12345"]
    assert prompts.num_too_long == 1
    with pytest.raises(ValueError, match="all 2 prompts are longer than data.max_prompt_tokens"):
        load(path, max_prompt_tokens=4)


BAD_LINES = [
    ('{"prompt": "a", "answer": 1', "broken JSON: Expecting ',' delimiter at column"),
    ('{\u201cprompt\u201d: "a", "answer": 1}', 'typographic quotes, write " instead'),
    ("[1, 2]", "a JSON list; a line is an object with prompt or messages, and answer"),
    ('{"answer": 1}', "neither prompt nor messages"),
    ('{"prompt": "a"}', 'no answer; if the reward needs none, write "answer": null'),
    ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}], "answer": 1}', "both prompt and messages"),
    ('{"prompt": 5, "answer": 1}', "prompt must be text that is not empty, found number 5"),
    ('{"prompt": "", "answer": 1}', "prompt must be text that is not empty"),
    ('{"prompt": "a", "answer": 1, "reward": ["x"]}', 'reward must be text that is not empty, found list ["x"]'),
    ('{"prompt": "a", "answer": 1, "id": 1.5}', "id must be text or an integer, found number 1.5"),
    ('{"prompt": "a", "answer": 1, "answer": 2}', "field 'answer' stands there twice"),
    ('{"prompt": "a", "answer": NaN}', "NaN is not JSON"),
    ('{"messages": [], "answer": 1}', "messages must be a list with at least one message"),
    ('{"messages": [{"role": "user"}], "answer": 1}', "messages[0] must be an object with role and content"),
    ('{"messages": [{"role": "human", "content": "a"}], "answer": 1}', "messages[0].role is 'human'; known: system"),
    ('{"messages": [{"role": "assistant", "content": "a"}], "answer": 1}', "the last message is the assistant's"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_line_is_told_with_file_line_and_reason(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, {"prompt": "good", "answer": 1}, "", line)
    with pytest.raises(PromptFileError) as error:
        load(path, apply_chat_template=True)
    assert f"{path}:3: " in str(error.value)
    assert message in str(error.value)
    assert str(error.value).startswith("data.prompts: 1 bad line\n")


def test_all_bad_lines_are_told_at_once_the_first_twenty_in_full(tmp_path: Path) -> None:
    path = write(tmp_path, *(line for line, _ in BAD_LINES), *(line for line, _ in BAD_LINES))
    with pytest.raises(PromptFileError) as error:
        load(path)
    assert len(error.value.problems) == 32
    assert str(error.value).startswith("data.prompts: 32 bad lines, the first 20 are shown\n")
    assert len(str(error.value).splitlines()) == 21


def test_files_that_are_missing_empty_or_not_utf8_are_told(tmp_path: Path) -> None:
    empty = write(tmp_path, "", name="empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a", "answer": 1}\n{"prompt": "caf\xe9", "answer": 1}\n')
    with pytest.raises(PromptFileError) as error:
        load(str(tmp_path / "none.jsonl"), empty, str(tmp_path / "latin.jsonl"), str(tmp_path))
    text = str(error.value)
    assert "none.jsonl: there is no such file" in text
    assert "empty.jsonl: the file has no prompts" in text
    assert "latin.jsonl:2: not UTF-8: byte 16 of the line" in text
    assert f"{tmp_path}: is a folder" in text
    with pytest.raises(ValueError, match="data.prompts: no file is given"):
        load()


def test_an_id_that_occurs_twice_is_told_with_both_lines(tmp_path: Path) -> None:
    first = write(tmp_path, {"id": 7, "prompt": "a", "answer": 1}, {"prompt": "b", "answer": 1})
    second = write(tmp_path, {"prompt": "b", "answer": 1}, {"id": "7", "prompt": "c", "answer": 1}, name="more.jsonl")
    with pytest.raises(PromptFileError) as error:
        load(first, second)
    assert f"{second}:2: id '7' is also that of {first}:1" in str(error.value)
    assert f"{second}:1: id " in str(error.value) and f"is also that of {first}:2" in str(error.value)


def test_settings_that_would_be_ignored_or_cannot_work_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"messages": [{"role": "user", "content": "a"}], "answer": 1})
    with pytest.raises(ValueError, match="data.system_message: is used by the chat template only"):
        load(path, system_message="short")
    with pytest.raises(ValueError, match="add.jsonl:1: messages need the chat template"):
        load(path)
    with pytest.raises(ValueError, match="data.apply_chat_template: the model's tokenizer has no chat template"):
        load(path, apply_chat_template=True, tokenizer=CharacterTokenizer(has_chat_template=False))
    system = write(tmp_path, {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}],
                              "answer": 1})  # fmt: skip
    with pytest.raises(ValueError, match="add.jsonl:1: has a system message, and data.system_message is set"):
        load(system, apply_chat_template=True, system_message="short")


def test_the_fingerprint_sees_every_change_that_training_would_see(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "id": "a",
        "prompt": "1+1=",
        "answer": 2,
        "reward": "number",
        "source": "s",
        "must_end": True,
    }
    base = load(write(tmp_path, row)).fingerprint
    assert load(write(tmp_path, dict(reversed(row.items())), name="other.jsonl")).fingerprint == base
    changes = {"id": "b", "prompt": "1+2=", "answer": "2", "reward": "math", "source": "t", "must_end": False}
    for name, value in changes.items():
        assert load(write(tmp_path, {**row, name: value})).fingerprint != base, name


def test_evaluation_prompts_that_are_trained_on_are_refused_by_name(tmp_path: Path) -> None:
    training = load(write(tmp_path, {"id": "a", "prompt": "1", "answer": 1}, {"id": "b", "prompt": "2", "answer": 1}))
    held_out = load(write(tmp_path, {"id": "c", "prompt": "3", "answer": 1}, name="c.jsonl"))
    check_held_out(training, held_out)
    overlapping = load(
        write(
            tmp_path,
            {"id": "a", "prompt": "4", "answer": 1},
            {"id": "d", "prompt": "2", "answer": 1},
            {"id": "e", "prompt": "5", "answer": 1},
            name="d.jsonl",
        )
    )
    with pytest.raises(ValueError, match=r"2 of 3 prompts are in data.prompts too: a, d \(trained as b\)"):
        check_held_out(training, overlapping)
