"""YAML text -> plain values, with the line of every key. Also the way back: values -> YAML text.

Scalars follow YAML 1.2: `1e-6` is a number, `yes`, `on` and `12:30` are text. PyYAML alone follows 1.1.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from grpo_megatron.config.problems import Problem

Path = tuple[str, ...]

_UNREADABLE = object()
_TAG = "tag:yaml.org,2002:"
_NUMBER = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+|0o[0-7]+", list("-+0123456789")),
    ("float", _NUMBER + r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.0123456789")),
)


class _Reader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


class _Writer(yaml.SafeDumper):
    """Quotes what this reader or any YAML 1.1 reader would take for something else than text."""


for _name, _pattern, _first in _SCALARS:
    for _class in (_Reader, _Writer):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


_Writer.add_representer(list, lambda writer, values: writer.represent_sequence(f"{_TAG}seq", values, flow_style=True))


@dataclass
class YamlTree:
    """Values as plain dicts, lists and scalars; `lines` names the line of every key and list entry."""

    value: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def parse_yaml(text: str, *, file: str) -> YamlTree:
    """Read one document. A syntax error ends the reading; duplicates and odd values do not."""
    reader = _Reader(text) if _printable(text) else None
    if reader is None:
        return YamlTree(problems=[_control_character(text, file=file)])
    try:
        node = reader.get_single_node()
    except yaml.MarkedYAMLError as error:
        return YamlTree(problems=_explain(error, text, file=file))
    finally:
        reader.dispose()
    tree = YamlTree()
    if node is not None:
        tree.value = _Converter(tree, file).convert(node, ())
    return tree


def write_yaml(values: Mapping[str, Any]) -> str:
    """The text that `parse_yaml` reads back to equal values."""
    return str(yaml.dump(dict(values), Dumper=_Writer, sort_keys=False, width=10_000, default_flow_style=False))


class _Converter:
    """Turns composed nodes into values and notes lines and problems in the tree."""

    def __init__(self, tree: YamlTree, file: str) -> None:
        self.tree = tree
        self.file = file
        self.open_nodes: set[int] = set()

    def convert(self, node: yaml.Node, path: Path) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self.open_nodes:
            line = self.tree.lines[path]
            what = "the value contains itself through an alias (*)"
            self.tree.problems.append(Problem(self.file, line, ".".join(path), what, "write the value out"))
            return _UNREADABLE
        self.open_nodes.add(id(node))
        value = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._sequence(node, path)
        self.open_nodes.remove(id(node))
        return value

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        self._refuse_tag(node, path, "map")
        values: dict[str, Any] = {}
        names: set[Path] = set()
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._report(key_node, path, "a key must be one word", "write  key: value")
                continue
            inner = (*path, key_node.value)
            if key_node.value == "<<":
                self._report(key_node, path, "merge keys (<<) are not read", "write the keys out")
            elif inner in names:
                first = self.tree.lines[inner]
                self._report(key_node, inner, f"the key is there twice, first in line {first}", "keep one of the two")
            else:
                names.add(inner)
                self.tree.lines[inner] = key_node.start_mark.line + 1
                value = self.convert(value_node, inner)
                if value is not _UNREADABLE:
                    values[key_node.value] = value
        return values

    def _sequence(self, node: yaml.Node, path: Path) -> list[Any]:
        self._refuse_tag(node, path, "seq")
        values = []
        for index, item in enumerate(node.value):
            inner = (*path, str(index))
            self.tree.lines[inner] = item.start_mark.line + 1
            values.append(self.convert(item, inner))
        return [value for value in values if value is not _UNREADABLE]

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        kind, text = node.tag.removeprefix(_TAG), node.value
        try:
            if kind == "float":
                number = float(text.replace(".inf", "inf").replace(".nan", "nan").lower())
                if not math.isfinite(number):
                    self._report(node, path, f"{text} is not a finite number", "write a number")
                    return _UNREADABLE
                return number
            if kind == "int":
                return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        except ValueError:
            self._report(node, path, f"{text!a} is not a number", "write a number")
            return _UNREADABLE
        if kind == "bool":
            return text.lower() == "true"
        if kind == "null":
            return None
        self._refuse_tag(node, path, "str")
        return text

    def _refuse_tag(self, node: yaml.Node, path: Path, plain: str) -> None:
        if node.tag != _TAG + plain:
            tag = node.tag.replace(_TAG, "!!")
            self._report(node, path, f"the tag {tag} is not read", "write the value without it")

    def _report(self, node: yaml.Node, path: Path, message: str, fix: str) -> None:
        self.tree.problems.append(Problem(self.file, node.start_mark.line + 1, ".".join(path), message, fix))


def _printable(text: str) -> bool:
    return yaml.reader.Reader.NON_PRINTABLE.search(text) is None


def _control_character(text: str, *, file: str) -> Problem:
    match = yaml.reader.Reader.NON_PRINTABLE.search(text)
    assert match is not None
    line = text.count("\n", 0, match.start()) + 1
    return Problem(file, line, "", f"the control character U+{ord(match[0]):04X}", "remove it; is this a text file?")


def _explain(error: yaml.MarkedYAMLError, text: str, *, file: str) -> list[Problem]:
    """A syntax error in words that do not need YAML's grammar."""
    lines = text.split("\n")
    glued = _find_lines(lines, r"\s*([A-Za-z_]\w*):([^\s:/].*)$", "no space after the colon", file=file)
    equals = _find_lines(lines, r"\s*([A-Za-z_]\w*)\s*=(.*)$", "'=' where a colon should be", file=file)
    if glued or equals:
        return glued + equals
    mark = error.problem_mark or error.context_mark
    here = mark.line + 1 if mark else None
    opened = error.context_mark.line + 1 if error.context_mark else here
    what, context = error.problem or str(error), error.context or ""
    if "unknown escape" in what:
        return [Problem(file, here, "", "a backslash inside double quotes", "use single quotes around the text")]
    if "undefined alias" in what or context == "while scanning an alias":
        return [Problem(file, here, "", "a value that starts with * stands for another one", "put it in quotes")]
    if "quoted scalar" in context:
        return [Problem(file, opened, "", "a quote is opened here and not closed", "close it on the same line")]
    if "<stream end>" in what and context == "while parsing a flow node":
        opened = max((number for number, line in enumerate(lines, start=1) if set(line) & set("[{")), default=here)
    if "expected ',' or" in what or context == "while parsing a flow node":
        fix = "close it, and put a comma between entries"
        return [Problem(file, opened, "", "a bracket is opened here and not closed, or a comma is missing", fix)]
    if "could not find expected ':'" in what:
        return [Problem(file, opened, "", "a line without a colon", "write  key: value")]
    if "mapping values are not allowed" in what or "expected <block end>" in what:
        return [_misplaced_key(lines, mark.line if mark else 0, mark.column if mark else 0, file=file)]
    if "another document" in what:
        return [Problem(file, here, "", "a second document starts here (---)", "keep one document")]
    if "cannot start any token" in what and mark is not None:
        character = lines[mark.line][mark.column : mark.column + 1]
        fix = f"put text that starts with {character} in quotes"
        return [Problem(file, here, "", f"a value cannot start with {character}", fix)]
    return [Problem(file, here, "", f"this is not YAML: {what}", "put text with special characters in quotes")]


def _find_lines(lines: list[str], pattern: str, message: str, *, file: str) -> list[Problem]:
    return [
        Problem(file, number, match[1], message, f"write  {match[1]}: {match[2].strip()}")
        for number, line in enumerate(lines, start=1)
        if (match := re.match(pattern, line))
    ]


def _misplaced_key(lines: list[str], index: int, column: int, *, file: str) -> Problem:
    """A second colon on the line, or a key that starts in another column than its neighbours."""
    before = [line for line in lines[:index] if line.strip() and not line.lstrip().startswith("#")]
    if ": " in lines[index][:column] or not before:
        fix = 'put text that contains ": " in quotes, and each key on a line of its own'
        return Problem(file, index + 1, "", "a second key on the line", fix)
    start, start_before = _column(lines[index]), _column(before[-1])
    message = f"the line starts in column {start}, the one before it in column {start_before}"
    return Problem(file, index + 1, "", message, "start keys of the same section in the same column")


def _column(line: str) -> int:
    return len(line) - len(line.lstrip()) + 1
