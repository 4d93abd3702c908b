"""Where SGLang is installed, and the arguments of its server as its source declares them. Imports none of it."""

import ast
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_megatron.config.field_types import fields_in

INSTALL = "bash tools/install_sglang.sh"
_ARGUMENTS = "srt/server_args.py"
_GROUPS = "srt/arg_groups/fields"
_CHOICES = "srt/arg_groups/choices.py"
_ANSWER_SECONDS = 30.0
_WHERE = """
import sys
sys.path = [folder for folder in sys.path if folder]  # not the folder from which we were called
import importlib.util
found = importlib.util.find_spec("sglang")
print("sglang is in", next(iter(found.submodule_search_locations or ()), "") if found else "")
"""


@dataclass(frozen=True)
class SglangPackage:
    """The package of one interpreter.

    Example:
        >>> SglangPackage(None, "is not installed", "bash tools/install_sglang.sh").folder is None
        True
    """

    folder: Path | None
    """None: it cannot be used, `message` and `fix` say why."""
    message: str = ""
    fix: str = ""

    @property
    def version(self) -> str:
        """As its own file says; empty when it does not."""
        file = self.folder and self.folder / "_version.py"
        text = file.read_text(encoding="utf-8") if file and file.is_file() else ""
        match = re.search(r"^__version__\b.*?['\"]([^'\"]+)['\"]", text, re.MULTILINE)
        return match[1] if match else ""


@dataclass(frozen=True)
class SglangField:
    """One field of SGLang's ServerArgs as it is declared."""

    group: str
    """Class that declares it, such as `Schedule` or `Lora`."""
    annotation: ast.expr
    choices: tuple[Any, ...] | None
    """None: anything of its type, or not to be read from the source."""
    other_names: tuple[str, ...]
    """Its names on SGLang's command line, where they differ."""


@lru_cache(maxsize=8)
def find_sglang(python: str | None = None) -> SglangPackage:
    """The package that an engine would import.

    Args:
        python: `modules.rollout.python`, which is asked once; None: this interpreter.
    """
    if python is None:
        specification = find_spec("sglang")
        folders = list(specification.submodule_search_locations or ()) if specification else []
        return _judge(folders[0] if folders else "", "this Python", f"run  {INSTALL}")
    fix = f"install SGLang there, or name the interpreter that has it; {INSTALL} makes one"
    try:
        done = subprocess.run(
            [python, "-c", _WHERE], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        return SglangPackage(None, f"{python} did not say within {_ANSWER_SECONDS:.0f} s where its SGLang is", fix)
    except OSError as error:
        return SglangPackage(None, f"{python} cannot be run ({error.strerror})", "name a Python interpreter")
    answers = [line for line in done.stdout.splitlines() if line.startswith("sglang is in")]
    if done.returncode or not answers:
        said = (done.stderr or done.stdout).strip().splitlines()
        ended = f"ended with exit code {done.returncode}" + (f": {said[-1][:200]}" if said else "")
        return SglangPackage(None, f"{python}, asked where its SGLang is, {ended}", "name a Python interpreter")
    return _judge(answers[-1].removeprefix("sglang is in").strip(), python, fix)


def _judge(folder: str, python: str, fix: str) -> SglangPackage:
    if not folder:
        return SglangPackage(None, f"SGLang is not installed for {python}", fix)
    if not (Path(folder) / _ARGUMENTS).is_file():
        return SglangPackage(None, f"{folder} is no SGLang: there is no {_ARGUMENTS} in it", fix)
    return SglangPackage(Path(folder))


@lru_cache(maxsize=8)
def read_sglang_fields(folder: Path) -> Mapping[str, SglangField]:
    """Every field of ServerArgs that may be given: declared in its own class, or in groups in files of their own."""
    groups = sorted((folder / _GROUPS).glob("*.py"))
    lists = _lists_in(folder / _CHOICES) if (folder / _CHOICES).is_file() else {}
    declared = [field for file in groups for field in fields_in(file)]
    declared += fields_in(folder / _ARGUMENTS, ("ServerArgs",))
    return {
        ast.unparse(field.target): _read_field(group, field, lists)
        for group, field in declared
        if not ast.unparse(field.target).startswith("_")
    }


def _read_field(group: str, field: ast.AnnAssign, lists: Mapping[str, tuple[Any, ...]]) -> SglangField:
    """`name: A[type, "help"]`, `name: A[type, Arg(help=..., choices=...)]` or `name: type`."""
    annotation = field.annotation
    details: dict[str | None, ast.expr] = {}
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated"):
        assert isinstance(annotation.slice, ast.Tuple)
        annotation, *others = annotation.slice.elts
        details = {word.arg: word.value for other in others if isinstance(other, ast.Call) for word in other.keywords}
    names = _values(details.get("aliases"), {}) or ()
    names += _values(details["cli_name"], {}) or () if "cli_name" in details else ()
    return SglangField(
        group=group,
        annotation=annotation,
        choices=_values(details.get("choices"), lists),
        other_names=tuple(str(name).lstrip("-").replace("-", "_") for name in names),
    )


def _lists_in(source: Path) -> dict[str, tuple[Any, ...]]:
    lists: dict[str, tuple[Any, ...]] = {}
    for statement in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            values = _values(statement.value, lists)
            if values is not None:
                lists[statement.targets[0].id] = values
    return lists


def _values(node: ast.expr | None, lists: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """The constants that are written; None where something has to be computed to know them."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        values = list(_constants(node.elts))
        return tuple(values) if len(values) == len(node.elts) else None
    if isinstance(node, ast.Constant):
        return (node.value,)
    if isinstance(node, ast.Name):
        return lists.get(node.id)
    if isinstance(node, ast.BinOp):
        left, right = _values(node.left, lists), _values(node.right, lists)
        return None if left is None or right is None else left + right
    return None


def _constants(nodes: list[ast.expr]) -> Iterator[Any]:
    for node in nodes:
        if isinstance(node, ast.Constant):
            yield node.value
