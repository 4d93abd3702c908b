"""Types, ranges and choices of single keys: pydantic finds what is wrong, this file says it."""

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo_megatron.config.layers import Layers
from grpo_megatron.config.options import Option, choices_of, expected_in_words, find_options, nearest
from grpo_megatron.config.problems import Origin, Problem, shown
from grpo_megatron.config.schema import Config

_RANGE_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


@dataclass(frozen=True)
class Validated:
    """The configuration with defaults in place of wrong values, which are named in `wrong_keys`."""

    config: Config
    problems: tuple[Problem, ...]
    wrong_keys: frozenset[str]


def validate(layers: Layers, *, file: str) -> Validated:
    """Check every value against its type; strict: no text for numbers, no whole number for true."""
    values = dict(layers.values)
    try:
        return Validated(_build(values), (), frozenset())
    except ValidationError as error:
        places = dict.fromkeys(_place(details["loc"]) for details in error.errors(include_url=False))
        kinds = {_place(details["loc"]): details["type"] for details in reversed(error.errors(include_url=False))}
    problems = []
    for key, index in places:
        origin = layers.origins.get(f"{key}.{index}" if index is not None else key, Origin(file))
        message, fix = _explain(find_options()[key], values[key], index, kinds[key, index])
        problems.append(Problem(origin.file, origin.line, key, message, fix))
    wrong_keys = frozenset(key for key, _ in places)
    for key in wrong_keys:
        del values[key]
    return Validated(_build(values), tuple(problems), wrong_keys)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def _build(values: dict[str, Any]) -> Config:
    # Through JSON, because pydantic's strict mode takes mappings for dataclasses and lists for tuples only there.
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        section = nested
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return _adapter().validate_json(json.dumps(nested), strict=True)


def _place(location: tuple[int | str, ...]) -> tuple[str, int | None]:
    """Key and list index; what pydantic appends beyond them names a branch of a union."""
    parts = [str(part) for part in location]
    for length in range(len(parts), 0, -1):
        key = ".".join(parts[:length])
        if key in find_options():
            index = location[length] if len(location) > length else None
            return key, index if isinstance(index, int) else None
    raise AssertionError(f"no key at {location}")


def _explain(option: Option, value: Any, index: int | None, kind: str) -> tuple[str, str]:
    annotation = option.annotation
    if index is not None:
        value, annotation = value[index], annotation.__args__[0]
    choices = choices_of(annotation)
    if kind == "literal_error" and isinstance(value, str) and set(choices) == set(choices_of(option.annotation)):
        meant = nearest(value, choices)
        listed = expected_in_words(annotation)
        return f"{shown(value)} is not known; expected {listed}", f"did you mean {meant}?" if meant else ""
    expected = expected_in_words(annotation)
    if kind in _RANGE_ERRORS:
        return f"{shown(value)} is out of range; expected {expected}", ""
    if value is None:
        return f"no value; expected {expected}", "write a value, or remove the line to take the default"
    text = "the text " if isinstance(value, str) else ""
    return f"expected {expected}, got {text}{shown(value)}", _fix_type(option, value, expected)


def _fix_type(option: Option, value: Any, expected: str) -> str:
    name = option.key.rpartition(".")[2]
    if "true or false" in expected and isinstance(value, str):
        word = value.strip().lower()
        if word in ("yes", "on", "y", "true"):
            return f"write  {name}: true  without quotes"
        if word in ("no", "off", "n", "false"):
            return f"write  {name}: false  without quotes"
    if "number" in expected and isinstance(value, str) and _is_number(value):
        return f"write  {name}: {value.strip()}  without quotes"
    if "number" in expected and isinstance(value, str) and (number := re.match(r"[-+]?\d+(\.\d+)?", value)):
        return f"write the number alone, for instance  {name}: {number[0]}"
    if "whole number" in expected and isinstance(value, float) and value.is_integer() and "e" not in repr(value):
        return f"write  {name}: {int(value)}"
    if expected.startswith("a list") and not isinstance(value, dict):
        return f"write  {name}: [{shown(value)}]"
    if expected.endswith("text") and isinstance(value, (int, float)):
        return f'put it in quotes:  {name}: "{shown(value)}"'
    if expected.endswith("text") and isinstance(value, dict):
        return "put text with a colon in quotes"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
