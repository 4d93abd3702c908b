"""The one place that turns the name of a reward into the reward. A library is imported when it is named."""

import difflib

from grpo_megatron.config.schema import REWARD_NAMES
from grpo_megatron.rewards.base import Reward


def build_reward(name: str) -> Reward:
    """Make the reward of this name.

    Raises:
        ValueError: there is no such reward, or the user's `module:function` cannot be used.
    """
    match name:
        case "math":
            from grpo_megatron.rewards.math import MathReward

            return MathReward()
        case "exact":
            from grpo_megatron.rewards.text import ExactReward

            return ExactReward()
        case "number":
            from grpo_megatron.rewards.text import NumberReward

            return NumberReward()
        case "reasoning_gym":
            from grpo_megatron.rewards.reasoning_gym import ReasoningGymReward

            return ReasoningGymReward()
        case _ if is_function_name(name):
            from grpo_megatron.rewards.custom import FunctionReward

            return FunctionReward(name)
        case _:
            raise ValueError(f"there is no such reward{suggest_reward(name)}")


def is_function_name(name: str) -> bool:
    """Whether the name reads `module:function`."""
    module, colon, function = name.partition(":")
    return colon == ":" and all(part.isidentifier() for part in (*module.split("."), *function.split(".")))


def suggest_reward(name: str) -> str:
    """The end of an error message: the nearest name and all names."""
    nearest = difflib.get_close_matches(name, REWARD_NAMES, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"{hint}. Known: {', '.join(REWARD_NAMES)}, or your own as module:function"
