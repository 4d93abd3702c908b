"""Does the configuration fit the model? For callers that have read the model; this folder does not read models."""

from collections.abc import Mapping

from grpo_megatron.config.problems import Origin, Problem
from grpo_megatron.config.schema import Config


def find_misfits(
    config: Config, *, max_positions: int, vocab_size: int, origins: Mapping[str, Origin] | None = None
) -> list[Problem]:
    """Settings that the model of `model.policy` cannot follow.

    Example:
        >>> [problem.key for problem in find_misfits(Config(), max_positions=1024, vocab_size=100)]
        ['modules.rollout.max_new_tokens']
    """
    found: list[tuple[str, str, str]] = []
    prompt = config.data.max_prompt_tokens
    answers = {"modules.rollout.max_new_tokens": config.modules.rollout.max_new_tokens}
    if config.monitor.evaluation_max_new_tokens is not None:
        answers["monitor.evaluation_max_new_tokens"] = config.monitor.evaluation_max_new_tokens
    for key, answer in answers.items():
        if prompt + answer > max_positions:
            message = (
                f"data.max_prompt_tokens {prompt} + {answer} = {prompt + answer} tokens, and the model knows "
                f"{max_positions} positions"
            )
            found.append((key, message, f"lower one of the two by {prompt + answer - max_positions}"))
    beyond = [token for token in config.modules.rollout.stop_token_ids if token >= vocab_size]
    if beyond:
        message = f"{', '.join(map(str, beyond))} is beyond the model's {vocab_size} tokens"
        found.append(("modules.rollout.stop_token_ids", message, "remove it"))
    places = [(origins or {}).get(key, Origin("configuration")) for key, _, _ in found]
    return [Problem(origin.file, origin.line, *texts) for origin, texts in zip(places, found, strict=True)]
