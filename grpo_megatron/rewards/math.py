"""Reward `math`: is the answer mathematically equal to the gold answer? Decided by math-verify, symbolically.

math-verify's own time-outs use SIGALRM, which works in a main thread only: both are off, and the pool's deadline with
its hard kill bounds every answer instead. Answers are parsed by a grammar, never evaluated as code.

Arguments of a prompt's line:
    boxed: "optional" (default) or "required". The last \\boxed{} counts in both; without a box, "required" gives 0
        and "optional" takes the last expression of the text.
    must_end: true gives credit only to answers that ended by themselves.
"""

import logging
import re
from functools import lru_cache
from typing import Any

import math_verify

from grpo_megatron.batch import Prompt, RewardResult, Rollout
from grpo_megatron.rewards.text import correctness_result
from grpo_megatron.rewards.values import UnparsableInput

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_LETTERS = ("A", "B", "C", "D", "E", "F")
_EXPRESSIONS = (
    math_verify.LatexExtractionConfig(boxed_match_priority=0),
    math_verify.ExprExtractionConfig(),
)
_CHOICES = (math_verify.StringExtractionConfig(strings=_LETTERS, lowercase=False),)

# It warns once per process that its time-outs are off, which is what we want.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def last_box(text: str) -> str | None:
    """What the last complete \\boxed{} holds, braces inside it included; None without one.

    Example:
        >>> last_box("first \\\\boxed{1}, no: \\\\boxed{\\\\frac{1}{2}}")
        '\\\\frac{1}{2}'
    """
    for found in reversed(list(_BOX.finditer(text))):
        depth = 1
        for position in range(found.end(), len(text)):
            if text[position] in "{}" and text[position - 1] != "\\":
                depth += 1 if text[position] == "{" else -1
                if depth == 0:
                    return text[found.end() : position]
    return None


class MathReward:
    """1 if math-verify finds the answer equal to the gold answer, else 0."""

    def score(self, prompt: Prompt, rollout: Rollout) -> RewardResult:
        mode = prompt.reward.arguments.get("boxed", "optional")
        if mode not in ("optional", "required"):
            raise UnparsableInput(f'boxed is {mode!r}; write "optional" or "required"')
        gold = _gold_text(prompt.reward.answer)
        box = last_box(rollout.text)
        if box is None and mode == "required":
            correct = False
        else:
            correct = _is_equal(gold, f"\\boxed{{{box}}}" if box is not None else rollout.text)
        result = correctness_result(prompt.reward, rollout, correct=correct)
        return RewardResult(result.score, {**result.parts, "boxed": float(box is not None)})


def _gold_text(answer: Any) -> str:
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)) or not str(answer).strip():
        raise UnparsableInput(f"the gold answer of a math reward is {answer!r}; write text or a number")
    text = str(answer).strip()
    box = last_box(text)
    return box if box is not None else text.strip("$")


def _is_equal(gold: str, answer: str) -> bool:
    choices = gold in _LETTERS
    expected = _parse_gold(gold, choices)
    if not expected:
        raise UnparsableInput(f"math-verify finds no expression in the gold answer {gold!r}")
    found = _parse(_plain_choice(answer) if choices else answer, choices)
    # An error while comparing comes from what the policy wrote: that answer is not the gold answer.
    return bool(math_verify.verify(expected, found, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parse_gold(gold: str, choices: bool) -> list[Any]:
    """Cached: a group of answers asks for the same gold again and again."""
    return _parse(gold if choices else f"\\boxed{{{gold}}}", choices)


def _parse(text: str, choices: bool) -> list[Any]:
    config = _CHOICES if choices else _EXPRESSIONS
    return list(math_verify.parse(text, extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None))


def _plain_choice(answer: str) -> str:
    """The letter inside a box, \\text{} or brackets around it aside."""
    box = last_box(answer)
    return re.sub(r"\\text\s*\{|[{}()$]", " ", box).strip() if box is not None else answer
