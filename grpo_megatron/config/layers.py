"""File and command line -> one flat table of keys with values and origins. Order: file < overrides.

Lists replace, sections merge. Unknown keys are reported here, with the nearest name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from grpo_megatron.config import options
from grpo_megatron.config.lookalikes import repair
from grpo_megatron.config.problems import COMMAND_LINE, Origin, Problem, shown
from grpo_megatron.config.yaml_tree import Path, YamlTree, parse_yaml

_ENGINE_KEY = "modules.rollout.engine"


@dataclass
class Layers:
    """Values that were given, by dotted key of the schema; absent keys have their default."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    """Of every key that was given, sections and list entries included."""
    problems: list[Problem] = field(default_factory=list)
    doubtful: set[str] = field(default_factory=set)
    """Keys and sections that were probably meant by something that could not be read."""


@dataclass
class _Given:
    """A tree of values as written, with where each key was written."""

    tree: dict[str, Any]
    origins: dict[Path, Origin]
    problems: list[Problem]


def merge_layers(file_tree: YamlTree, overrides: Sequence[str], *, file: str) -> Layers:
    """Lay the overrides over the file and sort everything into the keys of the schema."""
    given = _Given({}, {}, list(file_tree.problems))
    if isinstance(file_tree.value, dict):
        given.tree = file_tree.value
    elif file_tree.value is not None:
        fix = "write  key: value  lines, starting with a section such as  run:"
        given.problems.append(Problem(file, 1, "", f"the file holds {shown(file_tree.value)}, not sections", fix))
    given.origins = {path: Origin(file, line) for path, line in file_tree.lines.items()}
    for override in overrides:
        _apply_override(given, override)
    layers = Layers(problems=given.problems, doubtful={problem.key for problem in given.problems if problem.key})
    _sort_into_keys(layers, given, given.tree, section="", path=())
    return layers


def _apply_override(given: _Given, override: str) -> None:
    key, equals, text = (part.strip() for part in override.partition("="))
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        given.problems.append(_malformed(override, key, equals))
        return
    repaired = repair(text, file=COMMAND_LINE, has_lines=False)
    for problem in repaired.problems:
        given.problems.append(Problem(COMMAND_LINE, None, key, problem.message, f"write  {key}={repaired.text}"))
    parsed = parse_yaml(repaired.text, file=COMMAND_LINE)
    path = tuple(key.split("."))
    for problem in parsed.problems:
        fix = problem.fix or "put the value in quotes"
        given.problems.append(Problem(COMMAND_LINE, None, key, problem.message, fix))
    if not parsed.problems:
        _merge(given, given.tree, path[:-1], path[-1], parsed.value, done=())


def _malformed(override: str, key: str, equals: str) -> Problem:
    fix = "write  section.key=value,  for instance  run.steps=100"
    if override.startswith("-"):
        stripped = override.lstrip("-")
        fix = f"write  {stripped}" if equals else fix
        return Problem(COMMAND_LINE, None, override, "keys are given without dashes", fix)
    if equals:
        return Problem(COMMAND_LINE, None, override, f"{key!a} is not a dotted key", fix)
    if override.endswith((".yaml", ".yml")):
        return Problem(COMMAND_LINE, None, override, "there is one configuration file, this is a second", fix)
    return Problem(COMMAND_LINE, None, override, "no '=' in it", fix)


def _merge(given: _Given, tree: dict[str, Any], parents: Path, name: str, value: Any, *, done: Path) -> None:
    """Set `name` below `parents`; sections on both sides merge, anything else replaces."""
    origin = Origin(COMMAND_LINE)
    if parents:
        inner = tree.get(parents[0])
        path = (*done, parents[0])
        if not isinstance(inner, dict):
            inner = tree[parents[0]] = {}
            given.origins[path] = origin
        _merge(given, inner, parents[1:], name, value, done=path)
        return
    path = (*done, name)
    if isinstance(value, dict) and isinstance(tree.get(name), dict):
        for inner_name, inner_value in value.items():
            _merge(given, tree[name], (), inner_name, inner_value, done=path)
        return
    for stale in [other for other in given.origins if other[: len(path)] == path]:
        del given.origins[stale]
    tree[name] = value
    _note_origins(given, path, value, origin)


def _note_origins(given: _Given, path: Path, value: Any, origin: Origin) -> None:
    given.origins[path] = origin
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        _note_origins(given, (*path, str(name)), inner, origin)


def _sort_into_keys(layers: Layers, given: _Given, tree: dict[str, Any], *, section: str, path: Path) -> None:
    """Walk what was given in `path`, as keys of `section`; the two differ below a misspelt section."""
    for name, value in tree.items():
        key = f"{section}.{name}" if section else name
        inner_path = (*path, name)
        if "." in name:
            origin = given.origins[inner_path]
            fix = f"nest the names: {name.replace('.', ': ')} (dots are for the command line)"
            layers.problems.append(Problem(origin.file, origin.line, key, "a key with dots in a file", fix))
        elif key in options.find_options():
            _take_option(layers, given, key, value, inner_path)
        elif key in options.find_sections():
            layers.origins[key] = given.origins[inner_path]
            if isinstance(value, dict):
                _sort_into_keys(layers, given, value, section=key, path=inner_path)
            elif value is not None:
                layers.problems.append(_no_section(key, value, given.origins[inner_path]))
                layers.doubtful.add(key)
        else:
            _refuse_unknown(layers, given, key, value, inner_path)


def _take_option(layers: Layers, given: _Given, key: str, value: Any, path: Path) -> None:
    annotation = options.find_options()[key].annotation
    if key == _ENGINE_KEY and isinstance(value, str):
        value = value.removesuffix("_engine")
    if get_origin(annotation) is tuple and isinstance(value, str) and _holds_text(get_args(annotation)[0]):
        value = [value]
    if options.is_pass_through(key) and value is None:
        value = {}
    layers.values[key] = value
    for inner, origin in given.origins.items():
        if inner[: len(path)] == path:
            layers.origins[".".join((key, *inner[len(path) :]))] = origin


def _holds_text(annotation: Any) -> bool:
    return annotation is str or bool(options.choices_of(annotation))


def _no_section(key: str, value: Any, origin: Origin) -> Problem:
    names = _names_in(key)
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    fix = f"write  {key.rpartition('.')[2]}:  and below it its keys: {listed}"
    if origin.file == COMMAND_LINE:
        fix = f"write  {key}.KEY=VALUE  with one of its keys: {listed}"
    if isinstance(value, str) and (match := re.match(r"(\w+)[:=]\s*(.+)", value)):
        fix = f"write  {match[1]}: {match[2]}  with a space after the colon"
    return Problem(origin.file, origin.line, key, f"is a section, but holds {shown(value)}", fix)


def _refuse_unknown(layers: Layers, given: _Given, key: str, value: Any, path: Path) -> None:
    """Report the key. Below a misspelt section reading goes on, so that all problems show at once."""
    origin = given.origins[path]
    written = ".".join(path)
    meant = options.suggest_keys(key)
    layers.problems.append(Problem(origin.file, origin.line, written, "unknown key", _fix_unknown(key, meant)))
    is_section = len(meant) == 1 and meant[0] in options.find_sections()
    if isinstance(value, dict) and is_section and meant[0] not in layers.origins:
        _sort_into_keys(layers, given, value, section=meant[0], path=path)
    else:
        layers.doubtful.update(meant)


def _fix_unknown(key: str, meant: list[str]) -> str:
    if meant:
        return f"did you mean {' or '.join(meant)}?"
    section = key.rpartition(".")[0]
    return f"known {f'in {section}' if section else 'at the top level'}: {', '.join(_names_in(section))}"


def _names_in(section: str) -> list[str]:
    """The names directly below a section."""
    prefix = f"{section}." if section else ""
    keys = (key.removeprefix(prefix) for key in options.find_options() if key.startswith(prefix))
    return list(dict.fromkeys(key.split(".")[0] for key in keys))
