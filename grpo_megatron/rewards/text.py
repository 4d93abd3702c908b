"""Rewards that look at the text alone: `exact` (equal text) and `number` (the last number is the answer).

Both take the argument `must_end` from the prompt's line: true gives credit only to answers that ended by themselves
(finish reason `stop`), so an answer cut off at the token limit earns nothing. The part `ended` shows it either way.
"""

import re
from decimal import Decimal
from typing import Any

from grpo_megatron.batch import Prompt, RewardResult, RewardSpec, Rollout
from grpo_megatron.rewards.values import UnparsableInput, read_flag

# The look-behinds: a number stands on its own (neither the 2 of x2 nor the 5 of 3.5), and a minus after a digit, a
# letter or a bracket subtracts (20-3 holds 20 and 3), while after a space, "=" or nothing it is a sign.
_NUMBER = re.compile(r"(?<![A-Za-z0-9_.])(?:(?<![)\]])[+-])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
_MINUS_SIGNS = str.maketrans({"\u2212": "-", "\u2013": "-"})


def find_numbers(text: str) -> list[Decimal]:
    """Every number in the text, as a whole token, in order; thousands may be set apart by commas.

    Example:
        >>> find_numbers("112 - 12 = 100, not -3")
        [Decimal('112'), Decimal('12'), Decimal('100'), Decimal('-3')]
    """
    return [Decimal(found.group().replace(",", "")) for found in _NUMBER.finditer(text.translate(_MINUS_SIGNS))]


def contains_number(text: str, answer: Any) -> bool:
    """Whether the right number stands anywhere in the text; gives no credit for ending, nor takes any for talking on.

    Raises:
        UnparsableInput: `answer` is not one number.
    """
    return _gold_number(answer) in find_numbers(text)


def ended_by_itself(rollout: Rollout) -> bool:
    """Whether the policy stopped, and neither the token limit nor an abort stopped it."""
    return rollout.finish_reason == "stop"


def correctness_result(spec: RewardSpec, rollout: Rollout, *, correct: bool) -> RewardResult:
    """1 for a right answer, 0 for a wrong one; under `must_end` also 0 for one that was cut off."""
    ended, must_end = ended_by_itself(rollout), read_flag(spec, "must_end")
    score = float(correct and (ended or not must_end))
    return RewardResult(score, {"correct": float(correct), "ended": float(ended)})


class ExactReward:
    """1 if the answer equals the gold text, white space at both ends aside."""

    def score(self, prompt: Prompt, rollout: Rollout) -> RewardResult:
        gold = prompt.reward.answer
        if isinstance(gold, bool) or not isinstance(gold, (str, int, float)):
            raise UnparsableInput(f"the gold answer of an exact reward is {gold!r}; write text or a number")
        return correctness_result(prompt.reward, rollout, correct=rollout.text.strip() == str(gold).strip())


class NumberReward:
    """1 if the last number of the answer equals the gold number: 8, 8.0 and +8 are the same."""

    def score(self, prompt: Prompt, rollout: Rollout) -> RewardResult:
        gold = _gold_number(prompt.reward.answer)
        numbers = find_numbers(rollout.text)
        return correctness_result(prompt.reward, rollout, correct=bool(numbers) and numbers[-1] == gold)


def _gold_number(answer: Any) -> Decimal:
    if not isinstance(answer, bool) and isinstance(answer, (str, int, float)):
        text = str(answer).strip()
        numbers = find_numbers(text)
        if len(numbers) == 1 and _NUMBER.fullmatch(text.translate(_MINUS_SIGNS)):
            return numbers[0]
    raise UnparsableInput(f"the gold answer of a number reward is {answer!r}; write one number")
