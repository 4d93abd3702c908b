"""Fields and their types as they are written in another program's source, and whether a value of ours fits them.

So that the arguments of megatron-core and of the engines can be checked without importing them.
"""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

_LISTS = ("List", "list", "Tuple", "tuple", "Set", "set", "Sequence")
_SECTIONS = ("Dict", "dict", "Mapping")


def fields_in(source: Path, classes: Collection[str] | None = None) -> Iterator[tuple[str, ast.AnnAssign]]:
    """Class and declaration of every annotated field of the file's classes, or of those alone that are named."""
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ClassDef) and (classes is None or statement.name in classes):
            for member in statement.body:
                if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    yield statement.name, member


def allowed_types(annotation: ast.expr) -> Iterator[str]:
    """The written types of an annotation, unions and literals taken apart.

    Example:
        >>> list(allowed_types(ast.parse("Optional[Union[int, List[str]]]", mode="eval").body))
        ['int', 'list', 'null']
    """
    if isinstance(annotation, ast.Subscript):
        outer = ast.unparse(annotation.value).rpartition(".")[2]
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        if outer in ("Optional", "Union"):
            for part in inner:
                yield from allowed_types(part)
            if outer == "Optional":
                yield "null"
        elif outer == "Literal":
            values = [ast.literal_eval(part) for part in inner]
            yield from ("null" if value is None else repr(value) for value in values)
        else:
            yield _container(outer) or ast.unparse(annotation)
    elif isinstance(annotation, ast.BinOp):
        yield from allowed_types(annotation.left)
        yield from allowed_types(annotation.right)
    else:
        written = ast.unparse(annotation)
        yield "null" if written == "None" else _container(written.rpartition(".")[2]) or written


def fits(value: Any, kind: str) -> bool:
    """Is the value of this type, one of `allowed_types`?"""
    match kind:
        case "null":
            return value is None
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "list":
            return isinstance(value, (list, tuple))
        case "section":
            return isinstance(value, dict)
        case "Any":
            return True
    return repr(value) == kind  # a literal; a function, dtype or object cannot be written in YAML and never fits


def _container(name: str) -> str | None:
    return "list" if name in _LISTS else "section" if name in _SECTIONS else None
