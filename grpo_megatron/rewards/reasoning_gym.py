"""Reward `reasoning_gym`: the scorer that comes with each of the package's data sets.

Arguments of a prompt's line:
    dataset: name of the data set, such as "leg_counting".
    entry: the item as the package generated it (question, answer, metadata), as JSON.
    must_end: true gives credit only to answers that ended by themselves.

The answer is what stands between <answer> and </answer>, or the whole text without such tags. Nine of the package's
scorers hand the answer to Python's `eval` or to sympy's parser, which evaluates as well. Here `eval` is replaced by
`ast.literal_eval` in their modules, and sympy sees plain formulas only; tests find scorers that a newer package adds.
"""

import ast
import difflib
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS, get_score_answer_fn

from grpo_megatron.batch import Prompt, RewardResult, RewardSpec, Rollout
from grpo_megatron.rewards.text import ended_by_itself
from grpo_megatron.rewards.values import UnparsableInput, read_flag, to_score

EVALUATING_DATASETS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Their scorers call eval(answer)."""
FORMULA_DATASETS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Their scorers call sympy.parse_expr(answer)."""
TUPLE_DATASETS = frozenset({"arc_agi", "rearc"})
"""Their scorers compare with tuples, which JSON turned into lists."""
BROKEN_DATASETS: Mapping[str, str] = {"game_of_life_halting": "its scorer accepts every text"}

_FORMULA = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?|[A-Za-z]+|[-+*/^(),\s])*")
_FUNCTIONS = {"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "exp", "log", "ln", "sqrt", "pi"}

ScoreAnswer = Callable[[str | None, dict[str, Any]], float]


class ReasoningGymReward:
    """The data set's own score, 0 to 1."""

    def score(self, prompt: Prompt, rollout: Rollout) -> RewardResult:
        name, entry = _read_arguments(prompt.reward)
        if name in TUPLE_DATASETS:
            board = tuple(tuple(row) for row in entry["metadata"]["output"])
            entry = {**entry, "metadata": {**entry["metadata"], "output": board}}
        answer = extract_answer(rollout.text)
        if name in FORMULA_DATASETS and not is_plain_formula(answer):
            score = 0.0
        else:
            score = _score_by_package(name, answer, entry)
        ended, must_end = ended_by_itself(rollout), read_flag(prompt.reward, "must_end")
        credited = score if ended or not must_end else 0.0
        return RewardResult(credited, {"correct": score, "ended": float(ended)})


def extract_answer(text: str) -> str:
    """What stands in the last <answer> tag, or the whole text without one."""
    tagged = reasoning_gym.utils.extract_answer(text)
    return (text if tagged is None else str(tagged)).strip()


def is_plain_formula(answer: str) -> bool:
    """Numbers, operators, one-letter names and a few functions: nothing that an evaluator could be misled by.

    Example:
        >>> is_plain_formula("2*x + sin(x)"), is_plain_formula("x.__class__")
        (True, False)
    """
    if not _FORMULA.fullmatch(answer):
        return False
    return all(len(name) == 1 or name in _FUNCTIONS for name in re.findall(r"[A-Za-z]+", answer))


def _score_by_package(name: str, answer: str, entry: Mapping[str, Any]) -> float:
    try:
        value = _scorer(name)(answer, dict(entry))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        # Some scorers let a malformed answer raise; a malformed entry raises just so, hence an error and not a 0.
        raise UnparsableInput(f"the scorer of {name} cannot read the answer or the entry: {error!r}") from error
    return to_score(value, f"the score of {name}")


@lru_cache(maxsize=256)
def _scorer(name: str) -> ScoreAnswer:
    score: ScoreAnswer = get_score_answer_fn(name)
    if name in EVALUATING_DATASETS:
        module = sys.modules[DATASETS[name][0].__module__]
        module.eval = ast.literal_eval  # type: ignore[attr-defined]  # a global of the module comes before the builtin
    return score


def _read_arguments(spec: RewardSpec) -> tuple[str, Mapping[str, Any]]:
    name, entry = spec.arguments.get("dataset"), spec.arguments.get("entry")
    if not isinstance(name, str) or name not in DATASETS:
        nearest = difflib.get_close_matches(str(name), DATASETS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise UnparsableInput(f"dataset is {name!r}, which reasoning_gym does not have{hint}")
    if name in BROKEN_DATASETS:
        raise UnparsableInput(f"dataset {name} cannot be used: {BROKEN_DATASETS[name]}")
    if not isinstance(entry, dict) or "answer" not in entry or "metadata" not in entry:
        raise UnparsableInput("entry is missing or lacks answer or metadata; write the item as reasoning_gym made it")
    return name, entry
