"""The quickstart's problems: all there, split fairly, and readable by the trainer."""

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_megatron.config.schema import DataSection
from grpo_megatron.data.prompts import PromptSet, check_held_out, load_prompts
from tests.data.test_prompts import CharacterTokenizer

pytestmark = pytest.mark.unit

TOOL = Path(__file__).parents[2] / "tools" / "make_arithmetic.py"


def make(folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(TOOL), "--folder", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def load(folder: Path) -> tuple[PromptSet, PromptSet]:
    section = DataSection(
        prompts=(str(folder / "train.jsonl"),),
        evaluation=(str(folder / "evaluation.jsonl"),),
        apply_chat_template=False,
    )
    tokenizer = CharacterTokenizer()
    training = load_prompts(section, tokenizer, default_reward="math")
    return training, load_prompts(section, tokenizer, default_reward="math", part="evaluation")


def test_the_problems_are_complete_right_and_split_by_family(tmp_path: Path) -> None:
    make(tmp_path / "data")
    training, evaluation = load(tmp_path / "data")
    check_held_out(training, evaluation)
    assert len(evaluation) >= 240
    assert len(training) + len(evaluation) == 20 * 20 + 20 * 21 // 2 + 11 * 11
    sides: dict[tuple[str, int, int], set[str]] = {}
    for side, prompts in (("training", training), ("evaluation", evaluation)):
        for prompt in prompts:
            kind, a, b = prompt.id.split("-")[0], int(prompt.id.split("-")[1]), int(prompt.id.split("-")[2])
            expected = {"add": a + b, "sub": a - b, "mul": a * b}[kind]
            assert prompt.reward.answer == expected and expected >= 0
            assert f" {a} {dict(add='+', sub='-', mul='*')[kind]} {b}?" in prompt.text
            pair = (kind, a, b) if kind == "sub" else (kind, min(a, b), max(a, b))
            sides.setdefault(pair, set()).add(side)
    assert all(len(each) == 1 for each in sides.values()), "3 + 5 and 5 + 3 lie on one side"
    assert {prompt.source for prompt in evaluation} == {"add", "sub", "mul"}


def test_the_prompt_is_the_chat_markup_without_a_system_message(tmp_path: Path) -> None:
    make(tmp_path)
    training, evaluation = load(tmp_path)
    texts = {prompt.id: prompt for prompts in (training, evaluation) for prompt in prompts}
    prompt = texts["mul-7-8"]
    assert prompt.text == (
        "<|im_start|>user\nWhat is 7 * 8? Reply with only the number.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (prompt.reward.name, prompt.reward.answer, prompt.reward.arguments) == ("number", 56, {"must_end": True})


def test_a_second_run_writes_nothing_and_another_seed_splits_otherwise(tmp_path: Path) -> None:
    assert make(tmp_path).count("problems written") == 2
    before = (tmp_path / "evaluation.jsonl").read_text()
    assert make(tmp_path).count("there already") == 2
    make(tmp_path, "--seed", "7")
    assert (tmp_path / "evaluation.jsonl").read_text() != before
