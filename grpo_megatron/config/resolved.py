"""The resolved configuration as a file and as one number."""

import dataclasses
import hashlib
import json
from typing import Any

from grpo_megatron.config.schema import Config
from grpo_megatron.config.yaml_tree import write_yaml


def to_yaml(config: Config) -> str:
    """Every key with its value; `load_config` reads it back to an equal configuration."""
    return write_yaml(_as_plain(config))


def fingerprint(config: Config) -> str:
    """SHA-256 over all values: equal when two configurations are."""
    return hashlib.sha256(json.dumps(_as_plain(config), sort_keys=True).encode()).hexdigest()


def _as_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _as_plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_plain(inner) for inner in value]
    return value
