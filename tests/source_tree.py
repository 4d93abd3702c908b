"""The repository's Python files as syntax trees: what `test_architecture.py` reads its rules from."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "grpo_megatron"


@dataclass(frozen=True)
class Import:
    line: int
    module: str


@dataclass(frozen=True)
class Source:
    """One Python file of the repository."""

    path: Path

    @cached_property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.name)

    @cached_property
    def inside(self) -> str:
        """Path below the package, without the ending: `weights/publish`."""
        return self.name.removesuffix(".py").removesuffix("/__init__").removeprefix(f"{PACKAGE}/")

    @cached_property
    def unit(self) -> str:
        """What has a floor: a folder of the package, or a file directly in it."""
        return self.inside.split("/")[0]

    @cached_property
    def imports(self) -> list[Import]:
        """Wherever they stand: at the top, in functions, under TYPE_CHECKING, or by name through importlib."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [Import(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._base_of(node)
                found += [Import(node.lineno, f"{base}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if called in ("import_module", "__import__"):
                    found.append(Import(node.lineno, str(node.args[0].value)))
        return found

    def _base_of(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        folder = self.path.parent.relative_to(ROOT).parts
        return ".".join([*folder[: len(folder) - node.level + 1], *([node.module] if node.module else [])])


def python_files(*folders: str) -> list[Source]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [SOURCES.setdefault(path, Source(path)) for path in paths]


SOURCES: dict[Path, Source] = {}
PRODUCT = python_files(PACKAGE)
EVERYTHING = python_files(PACKAGE, "tools", "launch_scripts", "tests", "examples")
MODULES = {source.inside.replace("/", "."): source for source in PRODUCT if source.inside != PACKAGE}


def own_module(imported: str) -> str | None:
    """`grpo_megatron.weights.sink.Bucket` -> `weights.sink`; None for what is not ours."""
    parts = imported.split(".")
    if parts[0] != PACKAGE:
        return None
    for length in range(len(parts), 1, -1):
        if ".".join(parts[1:length]) in MODULES:
            return ".".join(parts[1:length])
    return parts[1] if len(parts) > 1 else None


def find_cycles(edges: dict[str, set[str]]) -> Iterator[list[str]]:
    """One cycle for each node that can be the first of one, found by depth-first search."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[list[str]]:
        if name in path:
            yield path[path.index(name) :]
        elif name not in done:
            for target in sorted(edges.get(name, ())):
                yield from visit(target, [*path, name])
            done.add(name)

    for name in sorted(edges):
        yield from visit(name, [])


def untyped(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
    missing = [argument.arg for argument in every if argument.annotation is None]
    return missing + (["the result"] if function.returns is None else [])
