"""Rewards of the runs in `cases_runs.py`: reward workers import this module, and nothing heavy with it."""

from grpo_megatron.batch import Prompt, Rollout


def share_of_digits(prompt: Prompt, rollout: Rollout) -> float:
    """A reward that a random model can climb at once."""
    return sum(character.isdigit() for character in rollout.text) / max(1, len(rollout.text))


def always_raises(prompt: Prompt, rollout: Rollout) -> float:
    raise RuntimeError("the judge is ill")
