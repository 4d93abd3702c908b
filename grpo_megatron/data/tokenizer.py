"""The tokenizer of an HF folder, behind the few calls that this program makes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.data.prompts import EncodedChat


class HfTokenizer:
    """Adapter over transformers' AutoTokenizer, loaded from a folder and never from a network."""

    def __init__(self, folder: str | Path, *, key: str = "model.policy") -> None:
        """Load the tokenizer.

        Args:
            key: configuration key that names the folder, for messages.

        Raises:
            ValueError: there is no such folder or no tokenizer in it.
        """
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{key}: there is no folder {self.folder} (from {Path.cwd()})")
        if not any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            raise ValueError(
                f"{key}: {self.folder} has no tokenizer; it needs tokenizer.json and tokenizer_config.json"
            )
        # Imported here: it takes seconds, and those who only read prompts do not need it.
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:
            raise ValueError(f"{key}: the tokenizer in {self.folder} cannot be loaded: {error}") from error

    @property
    def vocabulary_size(self) -> int:
        """Tokens the tokenizer knows; the model's embedding may have more rows."""
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: those of generation_config.json, else of config.json, else the tokenizer's own.

        Raises:
            ValueError: none of them names one, so no answer would ever end by itself.
        """
        for name in ("generation_config.json", "config.json"):
            ids = _as_ids(_read_json(self.folder / name).get("eos_token_id"))
            if ids:
                return ids
        ids = _as_ids(self._tokenizer.eos_token_id)
        if not ids:
            raise ValueError(f"model.policy: no end token in {self.folder}; add eos_token_id to generation_config.json")
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Ids of the text as it is: markup of special tokens becomes these tokens, none is added."""
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> EncodedChat:
        """The chat template applied, up to where the policy begins to answer.

        Raises:
            ValueError: the template refuses the messages.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise errors of jinja2
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return EncodedChat(str(text), tuple(self.encode_text(str(text))))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text without special tokens, exactly: no space is tidied away."""
        ids = list(token_ids)
        text = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def decode_with_special_tokens(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False))


def _as_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(int(i) for i in value) if isinstance(value, list) else ()


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model.policy: {file} is not JSON: {error}") from error
    return fields if isinstance(fields, dict) else {}
