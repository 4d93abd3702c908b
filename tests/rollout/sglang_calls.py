"""What our code asks of SGLang, read off its syntax trees: HTTP calls with their bodies, names, calls, arguments."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "grpo_megatron" / "rollout"
SPEAKERS = [FOLDER / "client.py", *sorted((FOLDER / "sglang").glob("*.py"))]
"""Files that may talk to a server."""
GUESTS = sorted((FOLDER / "sglang").rglob("*.py"))
"""Files that may run inside SGLang's processes."""
_VERBS = ("get", "post", "put", "delete")
_ADDRESS = re.compile(r"/[a-z]\w*(\?.*)?", re.DOTALL)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Unreadable(Exception):  # noqa: N818 not an error of ours
    """This test cannot see what is sent; write the call so that it can."""


@dataclass(frozen=True)
class HttpCall:
    place: str
    method: str
    path: str
    query: frozenset[str]
    body: dict[str, ast.expr] = field(default_factory=dict)


class OurSource:
    """One of our files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def functions(self) -> dict[str, Function]:
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, Function)}

    def place(self, node: ast.AST) -> str:
        return f"{self.name}:{node.lineno}"  # type: ignore[attr-defined]

    def http_calls(self) -> Iterator[HttpCall]:
        """Every call whose address is written out. Raises Unreadable for an address that is used in another way."""
        for node in ast.walk(self.tree):
            address = _address(node)
            if address is None or isinstance(self.parents.get(node), ast.JoinedStr):
                continue
            call = self.parents[node]
            verb = getattr(getattr(call, "func", None), "attr", "")
            if not isinstance(call, ast.Call) or verb not in _VERBS or call.args[:1] != [node]:
                raise Unreadable(f"{self.place(node)}: {address} is not the first argument of get, post, put or delete")
            path, _, query = address.partition("?")
            names = frozenset(re.findall(r"(\w+)=", query))
            sent = next((word.value for word in call.keywords if word.arg in ("json", "body", "data")), None)
            sent = call.args[1] if len(call.args) > 1 else sent
            body = {} if sent is None else self.entries(sent, self.function_around(call))
            yield HttpCall(self.place(node), verb.upper(), path, names, body)

    def function_around(self, node: ast.AST) -> Function | None:
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, Function):
                return node
        return None

    def entries(self, node: ast.expr, function: Function | None) -> dict[str, ast.expr]:
        """Names and values of the JSON object that an expression makes, those of all its branches together."""
        match node:
            case ast.Constant(value=None):
                return {}
            case ast.Dict():
                return self._entries_of_dict(node, function)
            case ast.BoolOp(values=branches):
                return self._together(branches, function)
            case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, op=ast.BitOr(), right=other):
                return self._together([one, other], function)
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                returned = [part.value for part in ast.walk(self.functions[name]) if isinstance(part, ast.Return)]
                return self._together([value for value in returned if value is not None], self.functions[name])
            case ast.Name(id=name) if function is not None:
                return self._entries_of_name(name, node, function)
        raise Unreadable(f"{self.place(node)}: what is in {ast.unparse(node)}?")

    def _together(self, nodes: list[ast.expr], function: Function | None) -> dict[str, ast.expr]:
        return {name: value for node in nodes for name, value in self.entries(node, function).items()}

    def _entries_of_dict(self, node: ast.Dict, function: Function | None) -> dict[str, ast.expr]:
        entries: dict[str, ast.expr] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                entries |= self.entries(value, function)
            elif isinstance(key, ast.Constant):
                entries[str(key.value)] = value
            else:
                raise Unreadable(f"{self.place(node)}: what name is {ast.unparse(key)}?")
        return entries

    def _entries_of_name(self, name: str, node: ast.expr, function: Function) -> dict[str, ast.expr]:
        """Of everything that is assigned to a local variable, or given for a parameter in this file."""
        found: list[dict[str, ast.expr]] = []
        for part in ast.walk(function):
            match part:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    found.append(self.entries(value, function))
                case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                    found.append(self.entries(value, function))
                case ast.AugAssign(target=ast.Name(id=target), value=value) if target == name:
                    found.append(self.entries(value, function))
                case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=target), slice=ast.Constant(value=key))]):
                    found += [{str(key): part.value}] if target == name else []
        parameters = [argument.arg for argument in function.args.args if argument.arg != "self"]
        if name in parameters:
            for call in ast.walk(self.tree):
                if isinstance(call, ast.Call) and _called(call) == function.name:
                    words = {word.arg: word.value for word in call.keywords}
                    given = words.get(name) or dict(zip(parameters, call.args, strict=False)).get(name)
                    found += [self.entries(given, self.function_around(call))] if given is not None else []
        if not found:
            raise Unreadable(f"{self.place(node)}: what is in {name}?")
        return {key: value for entries in found for key, value in entries.items()}

    def server_arguments(self) -> Iterator[tuple[str, str]]:
        """Place and name of each entry of a written-out object that has `model_path` among its names."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Dict):
                names = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                if "model_path" in names:
                    yield from ((self.place(node), str(name)) for name in names)

    def imported(self) -> dict[str, str]:
        """Local name -> dotted name, of all that comes from SGLang."""
        names = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {
                    alias.asname or "sglang": alias.name for alias in node.names if alias.name.split(".")[0] == "sglang"
                }
        return names

    def used(self) -> Iterator[tuple[str, str]]:
        """Place and dotted name of what is imported from SGLang, and of attributes read or set there."""
        names = self.imported()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                own = [alias.asname or alias.name.split(".")[0] for alias in node.names]
                yield from ((self.place(node), names[name]) for name in own if name in names)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
                yield self.place(node), f"{names[node.value.id]}.{node.attr}"
            elif isinstance(node, ast.Constant) and re.fullmatch(r"sglang\.[\w.]+", str(node.value)):
                yield self.place(node), str(node.value)

    def calls(self) -> Iterator[tuple[str, str, ast.Call]]:
        """Place and dotted name of each function of SGLang that is called by its imported name, with the call."""
        names = self.imported()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                called = node.func
                if isinstance(called, ast.Name) and called.id in names:
                    yield self.place(node), names[called.id], node
                elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                    owner = names.get(called.value.id)
                    if owner is not None:
                        yield self.place(node), f"{owner}.{called.attr}", node

    def words_read(self) -> Iterator[tuple[str, str]]:
        """Place and name of each entry that is read by a name written out: `answer["name"]`, `answer.get("name")`."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Subscript(slice=ast.Constant(value=str() as name), ctx=ast.Load()):
                    yield self.place(node), name
                case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str() as name), *_]):
                    yield self.place(node), name


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _address(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str() as text):
            return text if _ADDRESS.fullmatch(text) else None
        case ast.JoinedStr(values=[ast.Constant(value=str() as text), *_]):
            return text if _ADDRESS.fullmatch(text) else None
    return None
