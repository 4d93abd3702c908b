"""Prompt sets: rows of JSONL files, rendered and tokenised once. Owns neither the order (sampler) nor the tokenizer."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from grpo_megatron.batch import Prompt, RewardSpec
from grpo_megatron.config.schema import DataSection
from grpo_megatron.data.rows import BadLine, PromptFileError, Row, read_rows

_MAX_IDS_SHOWN = 20

Part = Literal["prompts", "evaluation"]


@dataclass(frozen=True)
class EncodedChat:
    """A chat as the model sees it.

    Example:
        >>> EncodedChat("<user>7*8?<answer>", (1, 7, 2)).token_ids
        (1, 7, 2)
    """

    text: str
    token_ids: tuple[int, ...]


class PromptTokenizer(Protocol):
    """What prompts need of a tokenizer; `tokenizer.py` has the one for HF folders."""

    @property
    def has_chat_template(self) -> bool: ...

    def encode_text(self, text: str) -> Sequence[int]:
        """Ids of the text as it is; markup of special tokens becomes these tokens, none is added."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> EncodedChat:
        """The chat template applied, up to where the policy begins to answer."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order of their files.

    Example:
        >>> prompt = Prompt("a", (1,), "1", RewardSpec("number", 2))
        >>> PromptSet((prompt,), num_too_long=0).reward_names
        ('number',)
    """

    prompts: tuple[Prompt, ...]
    num_too_long: int
    """Prompts left out, for they are longer than `data.max_prompt_tokens`."""

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    @property
    def reward_names(self) -> tuple[str, ...]:
        return tuple(sorted({prompt.reward.name for prompt in self.prompts}))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that training reads from these prompts, in order."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            spec = prompt.reward
            content = [prompt.id, prompt.token_ids, spec.name, spec.answer, dict(spec.arguments), prompt.source]
            digest.update(json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n")
        return digest.hexdigest()


def load_prompts(
    section: DataSection, tokenizer: PromptTokenizer, *, default_reward: str, part: Part = "prompts"
) -> PromptSet:
    """Read, render and tokenise the files of `data.prompts` or `data.evaluation`.

    Args:
        default_reward: for lines that name none.

    Raises:
        PromptFileError: listing every bad line.
        ValueError: the files and the settings of the section do not fit together.
    """
    key = f"data.{part}"
    paths = section.prompts if part == "prompts" else section.evaluation
    if not paths:
        raise ValueError(f"{key}: no file is given; add {key}=FILE.jsonl")
    encode = _choose_encoder(section, tokenizer)
    prompts: list[Prompt] = []
    problems: list[BadLine] = []
    num_too_long = 0
    for row in read_rows(paths, key=key):
        try:
            encoded = encode(row)
        except ValueError as error:
            problems.append(BadLine(row.file, row.line, str(error)))
            continue
        if not encoded.token_ids:
            problems.append(BadLine(row.file, row.line, "the prompt has no tokens"))
        elif len(encoded.token_ids) > section.max_prompt_tokens:
            num_too_long += 1
        else:
            spec = RewardSpec(row.reward or default_reward, row.answer, row.arguments)
            prompts.append(Prompt(row.id, encoded.token_ids, encoded.text, spec, row.source))
    if problems:
        raise PromptFileError(key, problems)
    if not prompts:
        raise ValueError(
            f"{key}: all {num_too_long} prompts are longer than data.max_prompt_tokens, "
            f"{section.max_prompt_tokens}; raise it or give shorter prompts"
        )
    return PromptSet(tuple(prompts), num_too_long)


def check_held_out(training: PromptSet, evaluation: PromptSet) -> None:
    """Evaluation prompts are never trained on.

    Raises:
        ValueError: naming those that are, by id or by the same tokens under another id.
    """
    ids = {prompt.id: prompt.id for prompt in training}
    tokens = {prompt.token_ids: prompt.id for prompt in training}
    shared = []
    for prompt in evaluation:
        twin = ids.get(prompt.id, tokens.get(prompt.token_ids))
        if twin is not None:
            shared.append(prompt.id if twin == prompt.id else f"{prompt.id} (trained as {twin})")
    if shared:
        more = f" and {len(shared) - _MAX_IDS_SHOWN} more" if len(shared) > _MAX_IDS_SHOWN else ""
        names = ", ".join(shared[:_MAX_IDS_SHOWN])
        raise ValueError(
            f"data.evaluation: {len(shared)} of {len(evaluation)} prompts are in data.prompts too: {names}{more}; "
            "take them out of one of the two"
        )


def _choose_encoder(section: DataSection, tokenizer: PromptTokenizer) -> Callable[[Row], EncodedChat]:
    if not section.apply_chat_template:
        if section.system_message is not None:
            raise ValueError(
                "data.system_message: is used by the chat template only; set data.apply_chat_template=true"
            )
        return lambda row: _encode_plain(row, tokenizer)
    if not tokenizer.has_chat_template:
        raise ValueError(
            "data.apply_chat_template: the model's tokenizer has no chat template; set data.apply_chat_template=false"
        )
    return lambda row: _encode_chat(row, section.system_message, tokenizer)


def _encode_plain(row: Row, tokenizer: PromptTokenizer) -> EncodedChat:
    if row.prompt is None:
        raise ValueError("messages need the chat template; set data.apply_chat_template=true or give prompt")
    return EncodedChat(row.prompt, tuple(tokenizer.encode_text(row.prompt)))


def _encode_chat(row: Row, system_message: str | None, tokenizer: PromptTokenizer) -> EncodedChat:
    messages: list[Mapping[str, Any]] = list(row.messages or ({"role": "user", "content": row.prompt},))
    if system_message is not None:
        if messages[0]["role"] == "system":
            raise ValueError("has a system message, and data.system_message is set, too; drop one")
        messages.insert(0, {"role": "system", "content": system_message})
    return tokenizer.encode_chat(messages)
