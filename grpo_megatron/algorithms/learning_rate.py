"""The learning rate as a function of the step alone, so that a resumed run has it without any state."""

import math

from grpo_megatron.config.schema import TrainingSection


def learning_rate(step: int, section: TrainingSection, *, num_steps: int) -> float:
    """Return the learning rate of a step, counted from 0.

    Linear warm-up reaches the full rate in step `warmup_steps - 1` and starts above 0; the decay begins after it and
    reaches `minimum_learning_rate` in the last step, `num_steps - 1`. Later steps stay there.
    """
    assert step >= 0, f"step {step}"
    peak, minimum = section.learning_rate, section.minimum_learning_rate
    if step < section.warmup_steps:
        return peak * (step + 1) / section.warmup_steps
    if section.decay == "constant":
        return peak
    num_decay_steps = max(1, num_steps - 1 - section.warmup_steps)
    progress = min(1.0, (step - section.warmup_steps) / num_decay_steps)
    remaining = 1.0 - progress if section.decay == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return minimum + (peak - minimum) * remaining
