"""What HF transformers says about a prompt and an answer: the independent oracle of every engine."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from grpo_megatron.batch import Prompt, Rollout


@cache
def hf_model(folder: Path):  # noqa: ANN201
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def greedy_ids(folder: Path, prompt: Prompt, num_tokens: int) -> list[int]:
    made = hf_model(folder).generate(
        torch.tensor([prompt.token_ids]), do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0
    )
    return made[0, len(prompt.token_ids) :].tolist()


@torch.no_grad()
def distributions(folder: Path, prompt: Prompt, answer: Sequence[int], temperature: float) -> torch.Tensor:
    """float64 log-probs [answer tokens, vocabulary] of what could have stood at each place of the answer."""
    logits = hf_model(folder)(torch.tensor([[*prompt.token_ids, *answer]])).logits[0, len(prompt.token_ids) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def logprobs(folder: Path, prompt: Prompt, rollout: Rollout, temperature: float) -> list[float]:
    rows = distributions(folder, prompt, rollout.token_ids, temperature)
    return rows.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0].tolist()


def largest_difference(
    folder: Path, prompts: dict[str, Prompt], rollouts: Sequence[Rollout], temperature: float
) -> float:
    """Over all tokens of all rollouts, between the engine's log-prob and HF's."""
    differences = [0.0]
    for rollout in rollouts:
        expected = logprobs(folder, prompts[rollout.prompt_id], rollout, temperature)
        differences += [abs(a - b) for a, b in zip(rollout.logprobs, expected, strict=True)]
    return max(differences)
