"""Lines of JSONL files as checked rows. Every bad line is found and told with file, line number and fix."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_PROBLEMS_SHOWN = 20
_OWN_FIELDS = ("id", "prompt", "messages", "answer", "reward", "source")
_ROLES = ("system", "user", "assistant", "tool")
_TYPOGRAPHIC_QUOTES = "\u201c\u201d\u201e\u2018\u2019\u00ab\u00bb"


@dataclass(frozen=True)
class BadLine:
    """One thing that is wrong, and where. Line 0 is the file as a whole."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.message}"


class PromptFileError(ValueError):
    """Prompt files with bad lines; the text shows the first of them and counts the rest."""

    def __init__(self, key: str, problems: Sequence[BadLine]) -> None:
        self.key, self.problems = key, tuple(problems)
        count = f"{len(problems)} bad line{'s' if len(problems) > 1 else ''}"
        if len(problems) > MAX_PROBLEMS_SHOWN:
            count += f", the first {MAX_PROBLEMS_SHOWN} are shown"
        shown = "\n".join(f"  {problem}" for problem in problems[:MAX_PROBLEMS_SHOWN])
        super().__init__(f"{key}: {count}\n{shown}")


@dataclass(frozen=True)
class Row:
    """One prompt as written, checked and not yet tokenised.

    Example:
        >>> row = Row("add.jsonl", 1, "3+5", "3 + 5 =", None, "8", "number", "add", {"must_end": True})
        >>> row.reward
        'number'
    """

    file: str
    line: int
    id: str
    prompt: str | None
    messages: tuple[Mapping[str, Any], ...] | None
    answer: Any
    reward: str | None
    source: str
    arguments: Mapping[str, Any]
    """Every field that is not one of ours."""


def read_rows(paths: Sequence[str], *, key: str) -> list[Row]:
    """Read JSONL files.

    Args:
        key: configuration key that names the files, for messages.

    Raises:
        PromptFileError: listing every bad line, empty and missing file, and id that occurs twice.
    """
    problems: list[BadLine] = []
    rows: list[Row] = []
    for path in paths:
        num_before = len(rows) + len(problems)
        for row in _read_file(path, problems):
            rows.append(row)
        if len(rows) + len(problems) == num_before:
            problems.append(BadLine(path, 0, "the file has no prompts; it needs one JSON object per line"))
    problems.extend(_find_duplicates(rows))
    if problems:
        raise PromptFileError(key, problems)
    return rows


def _read_file(path: str, problems: list[BadLine]) -> Iterator[Row]:
    if not Path(path).is_file():
        what = "is a folder, not a file" if Path(path).is_dir() else f"there is no such file (from {Path.cwd()})"
        problems.append(BadLine(path, 0, what))
        return
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield _parse_line(path, number, text)
            except UnicodeDecodeError as error:
                problems.append(BadLine(path, number, f"not UTF-8: byte {error.start + 1} of the line"))
            except ValueError as error:
                problems.append(BadLine(path, number, str(error)))


def _parse_line(path: str, number: int, text: str) -> Row:
    try:
        fields = json.loads(text, object_pairs_hook=_unique_fields, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        hint = '; it has typographic quotes, write " instead' if set(text) & set(_TYPOGRAPHIC_QUOTES) else ""
        raise ValueError(f"broken JSON: {error.msg} at column {error.colno}{hint}") from error
    except RecursionError as error:
        raise ValueError("broken JSON: nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {_json_type(fields)}; a line is an object with prompt or messages, and answer")
    _check_text_fields(fields)
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError("both prompt and messages; give one" if prompt is not None else "neither prompt nor messages")
    if "answer" not in fields:
        raise ValueError('no answer; if the reward needs none, write "answer": null')
    if messages is not None:
        _check_messages(messages)
    return Row(
        file=path,
        line=number,
        id=str(fields["id"]) if fields.get("id") is not None else _make_id(fields),
        prompt=prompt,
        messages=tuple(messages) if messages is not None else None,
        answer=fields["answer"],
        reward=fields.get("reward"),
        source=fields.get("source") or Path(path).stem,
        arguments={name: value for name, value in fields.items() if name not in _OWN_FIELDS},
    )


def _check_text_fields(fields: Mapping[str, Any]) -> None:
    for name in ("prompt", "reward", "source"):
        value = fields.get(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise ValueError(f"{name} must be text that is not empty, found {_json_type(value)} {_shorten(value)}")
    identity = fields.get("id")
    if identity is not None and (isinstance(identity, bool) or not isinstance(identity, (str, int)) or identity == ""):
        raise ValueError(f"id must be text or an integer, found {_json_type(identity)} {_shorten(identity)}")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages must be a list with at least one message, found {_shorten(messages)}")
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"messages[{position}] must be an object with role and content, both text")
        if message.get("role") not in _ROLES:
            raise ValueError(f"messages[{position}].role is {message.get('role')!r}; known: {', '.join(_ROLES)}")
    if messages[-1]["role"] in ("assistant", "system"):
        raise ValueError(f"the last message is the {messages[-1]['role']}'s; the policy answers a user or a tool")


def _find_duplicates(rows: Sequence[Row]) -> list[BadLine]:
    first: dict[str, Row] = {}
    problems = []
    for row in rows:
        other = first.setdefault(row.id, row)
        if other is not row:
            problems.append(BadLine(row.file, row.line, f"id {row.id!r} is also that of {other.file}:{other.line}"))
    return problems


def _make_id(fields: Mapping[str, Any]) -> str:
    """From what the line says, not from where it stands: moving lines changes no id."""
    canonical = json.dumps(fields, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"field {next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return fields


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "text", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _shorten(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
