"""What a scorer may return, and the kinds of failure that are counted.

A failure reads `kind: message`. It never becomes a silent 0: the pool applies the configured policy and counts it.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np

from grpo_megatron.batch import RewardResult, RewardSpec

ErrorKind = Literal["timeout", "exception", "bad_value", "died", "unparsable"]
ERROR_KINDS: tuple[ErrorKind, ...] = get_args(ErrorKind)
MAX_MESSAGE_CHARACTERS = 500

LARGEST_SCORE = 1e30
"""Its square, summed over a group, is still far from the largest float."""


class UnparsableInput(ValueError):
    """The prompt's gold answer or its arguments are not what the scorer needs. The policy's answer never is."""


class BadValue(ValueError):
    """A scorer returned something that is not a score."""


def describe_error(kind: ErrorKind, message: str) -> str:
    """One line of bounded length: `kind: message`.

    Example:
        >>> describe_error("timeout", "no score within 10 s")
        'timeout: no score within 10 s'
    """
    text = " ".join(message.split())
    return f"{kind}: {text[:MAX_MESSAGE_CHARACTERS]}"


def error_kind(error: str) -> ErrorKind:
    """The kind that an error text starts with; a text of the user's own counts as `exception`."""
    head = error.partition(":")[0]
    for kind in ERROR_KINDS:
        if head == kind:
            return kind
    return "exception"


def to_score(value: Any, what: str = "the reward") -> float:
    """Turn an int, bool, float or numpy scalar into a float.

    Raises:
        BadValue: None, NaN, infinity, text, tensors and whatever else is not a number.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (bool, int, float)):
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        fix = "; return float(value)" if hasattr(value, "__float__") else "; return a number"
        raise BadValue(f"{what} is {'None' if value is None else 'of type ' + name}{fix}")
    try:
        number = float(value)
    except OverflowError as error:
        raise BadValue(f"{what} is an integer beyond the range of a float") from error
    if not math.isfinite(number):
        raise BadValue(f"{what} is {number}; return a finite number")
    if abs(number) > LARGEST_SCORE:
        raise BadValue(f"{what} is {number:g}; group statistics need numbers up to {LARGEST_SCORE:g}")
    return number


def to_result(value: Any) -> RewardResult:
    """Turn what a scorer returned, a number or a RewardResult, into a checked RewardResult.

    Raises:
        BadValue: the score or one of the parts is not a finite number.
    """
    if not isinstance(value, RewardResult):
        return RewardResult(to_score(value))
    if not isinstance(value.parts, Mapping):
        raise BadValue(f"parts is of type {type(value.parts).__name__}; return a mapping from name to number")
    parts = {str(name): to_score(part, f"part {name!r}") for name, part in value.parts.items()}
    if value.error is not None:
        return RewardResult(None, parts, describe_error(error_kind(str(value.error)), _message(str(value.error))))
    return RewardResult(to_score(value.score), parts)


def _message(error: str) -> str:
    head, _, rest = error.partition(":")
    return rest if head in ERROR_KINDS else error


def read_flag(spec: RewardSpec, name: str) -> bool:
    """A yes or no among the arguments of a prompt's line; False if it is not there.

    Raises:
        UnparsableInput: it is there and neither true nor false.
    """
    value = spec.arguments.get(name, False)
    if not isinstance(value, bool):
        raise UnparsableInput(f"{name} is {value!r}; write true or false")
    return value
