"""SGLang as its installed source declares it: routes, request structs, names of modules. Imports none of it."""

import ast
import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

Callable_ = ast.FunctionDef | ast.AsyncFunctionDef
_SPECIFICATION = importlib.util.find_spec("sglang")
FOLDERS = list(_SPECIFICATION.submodule_search_locations or ()) if _SPECIFICATION else []
SGLANG = Path(FOLDERS[0]) if FOLDERS else None
STRUCTS = "srt/managers/io_struct.py"
SERVER = "srt/entrypoints/http_server.py"


@dataclass(frozen=True)
class Fields:
    """What may and what must be in a JSON object."""

    known: frozenset[str]
    required: frozenset[str]


@dataclass(frozen=True)
class Route:
    methods: frozenset[str]
    query: frozenset[str]
    """Parameters that stand in the address."""
    body: Fields | None
    """None: the body is not looked at."""


@lru_cache
def tree_of(name: str) -> ast.Module:
    """A file of SGLang's package."""
    assert SGLANG is not None
    return ast.parse((SGLANG / name).read_text(encoding="utf-8"))


@lru_cache
def routes() -> dict[str, Route]:
    """Everything that the HTTP server answers, by path."""
    found = {}
    for function in tree_of(SERVER).body:
        if isinstance(function, Callable_):
            for decorator in function.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).startswith("app."):
                    path = decorator.args[0] if decorator.args else None
                    if isinstance(path, ast.Constant):
                        found[str(path.value)] = _route(function, decorator)
    return found


def _route(function: Callable_, decorator: ast.Call) -> Route:
    kind = ast.unparse(decorator.func).removeprefix("app.")
    given = next((word.value for word in decorator.keywords if word.arg == "methods"), None)
    methods = ast.literal_eval(given) if given is not None else [kind.upper()]
    structs = class_names(STRUCTS)
    body, query = None, set()
    for argument in function.args.args:
        names = {node.id for node in ast.walk(argument.annotation) if isinstance(node, ast.Name)}  # type: ignore[arg-type]
        if names & structs:
            body = fields_of((names & structs).pop())
        elif "Request" not in names:
            query.add(argument.arg)
    return Route(frozenset(methods), frozenset(query), body)


@lru_cache
def class_names(file: str) -> frozenset[str]:
    return frozenset(node.name for node in tree_of(file).body if isinstance(node, ast.ClassDef))


@lru_cache
def fields_of(name: str, file: str = STRUCTS) -> Fields:
    """Fields of a struct or dataclass, those of its bases in the same file included."""
    (found,) = (node for node in tree_of(file).body if isinstance(node, ast.ClassDef) and node.name == name)
    own = [member for member in found.body if isinstance(member, ast.AnnAssign)]
    bases = [fields_of(ast.unparse(base), file) for base in found.bases if ast.unparse(base) in class_names(file)]
    known = {ast.unparse(member.target) for member in own}.union(*(base.known for base in bases))
    required = {ast.unparse(member.target) for member in own if member.value is None}
    return Fields(frozenset(known), frozenset(required.union(*(base.required for base in bases))))


def file_of(module: str) -> str | None:
    """`sglang.srt.utils` -> `srt/utils/__init__.py`; None if there is no such module."""
    assert SGLANG is not None
    place = "/".join(module.split(".")[1:])
    for file in (f"{place}.py", f"{place}/__init__.py" if place else "__init__.py"):
        if (SGLANG / file).is_file():
            return file
    return None


def definition(dotted: str) -> ast.AST | str | None:
    """What `sglang.module.name` or `sglang.module.Class.name` is: its definition, its module's file, or None.

    Names that a module imports from elsewhere in SGLang are followed; a name assigned to is its assignment.
    """
    if file_of(dotted) is not None:
        return file_of(dotted)
    parent, _, name = dotted.rpartition(".")
    if not parent:
        return None
    owner = definition(parent)
    if isinstance(owner, ast.ClassDef):
        return next((found for member in owner.body if (found := _defined_by(member, name)) is not None), None)
    if not isinstance(owner, str):
        return None
    for statement in ast.walk(tree_of(owner)):
        if isinstance(statement, ast.stmt) and (found := _defined_by(statement, name)) is not None:
            if isinstance(found, ast.ImportFrom):
                source = f"{found.module}.{name}" if found.module and not found.level else ""
                return definition(source) if source.startswith("sglang.") else found
            return found
    stars = [
        node.module for node in tree_of(owner).body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
    ]
    return next((found for star in stars if star and (found := definition(f"{star}.{name}")) is not None), None)


def _defined_by(statement: ast.AST, name: str) -> ast.AST | None:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if statement.name == name:
            return statement
        case ast.ImportFrom() if any((alias.asname or alias.name) == name for alias in statement.names):
            return statement
        case ast.Assign() if any(isinstance(node, ast.Name) and node.id == name for node in statement.targets):
            return statement
        case ast.AnnAssign() if isinstance(statement.target, ast.Name) and statement.target.id == name:
            return statement
    return None


@lru_cache
def words() -> frozenset[str]:
    """Every string constant in the files that make an answer."""
    names = ("tokenizer_manager", "io_struct", "schedule_batch")
    files = [SERVER, "srt/utils/weight_versions.py", *(f"srt/managers/{name}.py" for name in names)]
    constants = (node.value for file in files for node in ast.walk(tree_of(file)) if isinstance(node, ast.Constant))
    return frozenset(value for value in constants if isinstance(value, str))
