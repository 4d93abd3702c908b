"""Characters that copy and paste brings in and that only look right: tabs, typographic quotes, long dashes,
non-breaking spaces. Finds all of them outside quoted text, and repairs the text so that reading can go on.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_megatron.config.problems import Problem

_REPLACEMENTS = {
    '"': "\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb\uff02",
    "'": "\u2018\u2019\u201a\u201b\u2032\u00b4\uff07",
    "-": "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\uff0d",
    " ": "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000",
    "": "\u200b\u200c\u200d\u2060\ufeff\u00ad",
    ":": "\uff1a",
    ",": "\uff0c",
    "#": "\uff03",
    "=": "\uff1d",
    "[": "\uff3b",
    "]": "\uff3d",
    "{": "\uff5b",
    "}": "\uff5d",
}
_PLAIN = {lookalike: plain for plain, lookalikes in _REPLACEMENTS.items() for lookalike in lookalikes}
_QUOTES = _REPLACEMENTS['"'] + _REPLACEMENTS["'"]
_KINDS = {'"': "typographic quotes", "'": "typographic quotes", "-": "a dash that is no minus", " ": "a wide space"}


@dataclass(frozen=True)
class RepairedText:
    """The text with plain characters, the line count unchanged, and a problem for each line that was touched."""

    text: str
    problems: tuple[Problem, ...]


def repair(text: str, *, file: str, has_lines: bool = True) -> RepairedText:
    """Find what only looks right, and what it was meant to be."""
    lines = text.split("\n")
    tab_width = _indentation_step(lines)
    repaired: list[str] = []
    problems: list[Problem] = []
    for number, (line, structural) in enumerate(zip(lines, _structural_columns(lines), strict=True), start=1):
        place = number if has_lines else None
        found = [column for column in structural if _is_lookalike(line, column)]
        tabs = [column for column in structural if line[column] == "\t"]
        plain = _repair_line(line, {*found, *tabs}, tab_width)
        key = _key_of(plain)
        if tabs:
            problems.append(_tab_problem(line, file=file, line_number=place, key=key))
        if found:
            characters = list(dict.fromkeys(line[column] for column in found))
            problems.append(Problem(file, place, key, _describe(characters), f"write  {plain.strip()}"))
        repaired.append(plain)
    return RepairedText("\n".join(repaired), tuple(problems))


def _tab_problem(line: str, *, file: str, line_number: int | None, key: str) -> Problem:
    if line[: len(line) - len(line.lstrip())].count("\t"):
        return Problem(file, line_number, key, "the line is indented with a tab", "indent with spaces, two for a level")
    return Problem(file, line_number, key, "a tab between the words", "use spaces")


def _describe(characters: list[str]) -> str:
    kinds = dict.fromkeys(
        _KINDS.get(_PLAIN[character], "a character that only looks right") for character in characters
    )
    names = ", ".join(f"U+{ord(character):04X} {unicodedata.name(character).lower()}" for character in characters)
    return f"{' and '.join(kinds)} ({names})"


def _is_lookalike(line: str, column: int) -> bool:
    character = line[column]
    if character not in _PLAIN:
        return False
    inside_word = line[column - 1 : column].isalpha() and line[column + 1 : column + 2].isalpha()
    return not (character in _QUOTES and inside_word)


def _repair_line(line: str, columns: set[int], tab_width: int) -> str:
    characters: list[str] = []
    for column, character in enumerate(line):
        if column not in columns:
            characters.append(character)
        elif character == "\t":
            characters.append(" " * (1 if line[:column].strip() else tab_width))
        else:
            characters.append(_PLAIN[character])
    return "".join(characters)


def _indentation_step(lines: list[str]) -> int:
    widths = [len(line) - len(line.lstrip(" ")) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return min((width for width in widths if width), default=2)


def _key_of(line: str) -> str:
    match = re.match(r"""\s*["']?([A-Za-z_][A-Za-z_0-9]*)["']?\s*:(\s|$)""", line)
    return match[1] if match else ""


def _structural_columns(lines: list[str]) -> Iterator[list[int]]:
    """For each line the columns outside comments, quoted text and block text: there a look-alike is no content."""
    quote = ""
    block_indentation: int | None = None
    for line in lines:
        indentation = len(line) - len(line.lstrip())
        if block_indentation is not None and (not line.strip() or indentation > block_indentation):
            yield []
            continue
        block_indentation = None
        columns, quote = _scan_line(line, quote)
        structural = "".join(line[column] for column in columns)
        if not quote and re.search(r"(^|[\s:-])[|>][-+0-9]*\s*$", structural):
            block_indentation = indentation
        yield columns


def _scan_line(line: str, quote: str) -> tuple[list[int], str]:
    """Structural columns of one line that starts inside `quote` (or outside any), and the quote it ends in."""
    columns: list[int] = []
    column = 0
    while column < len(line):
        character = line[column]
        if quote:
            if character == "\\" and quote == '"':
                column += 1
            elif character == quote:
                quote = ""
        elif character == "#" and (column == 0 or line[column - 1].isspace()):
            break
        elif character in "\"'" and _opens_quote(line, column):
            quote = character
        else:
            columns.append(column)
        column += 1
    return columns, quote


def _opens_quote(line: str, column: int) -> bool:
    before = line[:column].rstrip()
    if before and (before[-1] not in ":,[{-?" or (before[-1] in ":-?" and not line[column - 1].isspace())):
        return False
    rest = line[column + 1 :]
    opened_plain_closed_curly = line[column] not in rest and any(character in _QUOTES for character in rest)
    return not opened_plain_closed_curly
