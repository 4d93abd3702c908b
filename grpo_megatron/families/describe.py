"""From an HF folder to a description: the registry of model families."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_megatron.families import llama, qwen2
from grpo_megatron.families.base import ModelDescription, ModelFamily, TensorRule
from grpo_megatron.families.reading import ConfigReader

KNOWN_FAMILIES = ("llama", "qwen2")


def find_family(name: str) -> ModelFamily:
    """The family whose HF `model_type` this is. A new family is one file and one line here.

    Raises:
        ValueError: naming the known families.
    """
    match name:
        case "llama":
            return llama
        case "qwen2":
            return qwen2
    raise ValueError(f"model_type {name!r} is not known here; known: {', '.join(KNOWN_FAMILIES)}")


def describe(folder: Path) -> ModelDescription:
    """Read config.json (and the end tokens of generation_config.json) of an HF folder.

    Raises:
        ValueError: the folder or file is not there, is no JSON, or describes something that is not supported.
    """
    folder = Path(folder)
    path = folder / "config.json"
    config = _read_json(path)
    try:
        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            raise ValueError("model_type is missing")
        description = find_family(model_type).describe(config)
        generation_path = folder / "generation_config.json"
        if generation_path.is_file():
            reader = ConfigReader(_read_json(generation_path))
            end_tokens = reader.token_ids("eos_token_id")
            reader.finish()
            if end_tokens:
                description = replace(description, eos_token_ids=end_tokens)
    except ValueError as error:
        raise ValueError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None
    return description


def tensor_rules(description: ModelDescription) -> tuple[TensorRule, ...]:
    """The table of the description's family, in the order in which all ranks walk it."""
    return find_family(description.family).tensor_rules(description)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder; a model is an HF folder with config.json and safetensors")
    if not path.is_file():
        raise ValueError(f"{path}: not there; a model is an HF folder with config.json and safetensors")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value
