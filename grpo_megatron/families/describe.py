"""From an HF folder to a description: the registry of model families."""

import importlib
import json
import pkgutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_megatron.families import known
from grpo_megatron.families.base import ModelDescription, ModelFamily, TensorRule
from grpo_megatron.families.reading import ConfigReader


def known_families() -> tuple[str, ...]:
    """HF `model_type`s that have a file in `families/known/`."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(known.__path__)))


def find_family(name: str) -> ModelFamily:
    """The family whose HF `model_type` this is: the file of that name in `families/known/`.

    Raises:
        ValueError: naming the known families.
    """
    if name not in known_families():
        raise ValueError(f"model_type {name!r} is not known here; known: {', '.join(known_families())}")
    return importlib.import_module(f"{known.__name__}.{name}")


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
