"""Reward `module:function`: the user's own function, importable from the working directory.

It is called in a worker process as `function(prompt, rollout)` with the records of `batch.py` and returns a number
or a RewardResult. `prompt.reward.answer` is the gold answer, `prompt.reward.arguments` every further field of the
prompt's line, `rollout.text` the answer.

Example of a module `my_rewards.py`, configured as `my_rewards:short_and_right`:

    def short_and_right(prompt, rollout):
        right = rollout.text.strip() == prompt.reward.answer
        return float(right) - 0.001 * rollout.num_tokens
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from grpo_megatron.batch import Prompt, RewardResult, Rollout
from grpo_megatron.rewards.values import to_result


class FunctionReward:
    """Calls the user's function and checks what it returns."""

    def __init__(self, name: str) -> None:
        self._function = load_function(name)

    def score(self, prompt: Prompt, rollout: Rollout) -> RewardResult:
        return to_result(self._function(prompt, rollout))


def load_function(name: str) -> Callable[[Prompt, Rollout], Any]:
    """Import `module:function` and check that it takes (prompt, rollout).

    Raises:
        ValueError: it cannot be imported, is not there, or takes other arguments.
    """
    module_name, _, function_name = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module does on import
        raise ValueError(f"importing {module_name} failed: {type(error).__name__}: {error}") from error
    for part in function_name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module_name} has no {function_name}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{name} is of type {type(found).__name__}, not a function")
    if inspect.iscoroutinefunction(found):
        raise ValueError(f"{name} is async; write a plain function, it runs in a process of its own")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise ValueError(f"{name} must take (prompt, rollout): {error}") from error
    except ValueError:
        pass  # built-in functions have no signature to check
    function: Callable[[Prompt, Rollout], Any] = found
    return function
