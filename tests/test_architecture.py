"""The rules of the house, checked on the source text alone: floors, cycles, libraries, budgets, documentation.

Every message says what to do. An exception is a line in a table of this file, with its reason; one that is no longer
needed fails as well.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.source_tree import (
    EVERYTHING,
    MODULES,
    PACKAGE,
    PRODUCT,
    ROOT,
    Source,
    find_cycles,
    own_module,
    python_files,
    untyped,
)

pytestmark = pytest.mark.architecture

FLOORS = {
    "train": 5,
    "scheduler": 4,
    "rollout": 3,
    "forward": 3,
    "trainer": 3,
    "execution": 2,
    "data": 2,
    "rewards": 2,
    "algorithms": 2,
    "models": 2,
    "memory": 2,
    "weights": 2,
    "checkpoint": 2,
    "monitor": 2,
    "families": 1,
    "batch": 1,
    "parallel": 1,
    "config": 0,
    "platform": 0,
    "utils": 0,
}

TORCH_FREE = (
    "batch",
    "config",
    "data",
    "families",
    "memory/base",
    "parallel/grid",
    "rewards",
    "rollout/base",
    "rollout/sglang/plan",
)
"""Folders and files that work where no deep-learning library is installed, directly and by what they import."""
HEAVY_LIBRARIES = ("torch", "megatron", "transformers", "sglang", "vllm")
HEAVY_ALLOWED = {
    ("data/tokenizer", "transformers"): "the tokenizer itself, imported when it is loaded; it needs no torch",
}

MEGATRON_FILES = {
    "checkpoint/model_state": "sharded state of optimizer and model",
    "checkpoint/random_state": "the tracker of random states",
    "checkpoint/torch_dist": "dist_checkpointing",
    "execution/pipeline": "the pipeline schedules",
    "forward/logprobs": "the stage's place in the pipeline",
    "models/build": "GPTModel and its configuration",
    "models/forward": "one forward of a chunk",
    "models/head": "the vocabulary-parallel head",
    "models/layers": "layer specs, Transformer Engine's and the local ones",
    "parallel/groups": "its own registry of process groups is filled here",
    "platform/attention": "the base class of a core attention",
    "platform/checkpoint_writer": "a patch for machines without CUDA",
    "platform/compatibility": "what differs between versions",
    "platform/megatron_on_cpu": "patches for machines without CUDA",
    "platform/optimizer_checkpoint": "patches of the distributed optimizer's state",
    "platform/paged_attention": "paged attention without flash-attn",
    "rollout/megatron/build": "the training modules that the engine runs on",
    "rollout/megatron/context": "what attention asks of an inference context",
    "rollout/megatron/forward": "one engine step through the training modules",
    "scheduler/parts": "the type of the model chunks that it hands on",
    "trainer/loss": "the chunk whose log-probs the loss takes",
    "trainer/optimizer": "data parallelism and the distributed optimizer",
    "trainer/policy": "the stage's place in the pipeline",
}
"""Files that may name megatron.core, each with what it takes from there: the whole surface an upgrade has to check."""

OPTIONAL_LIBRARIES = {"sglang": "rollout/sglang", "vllm": "rollout/vllm", "wandb": "monitor"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
LONGER_FILES: dict[str, str] = {}
LONGER_FUNCTIONS: dict[str, str] = {}
"""`path::function` -> reason."""

README_FOLDERS = ("constraints", "examples", "launch_scripts", "tests", "tools")
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX|NotImplemented" r"Error)\b")


def report(problems: list[str], rule: str) -> str:
    return f"{rule}\n  " + "\n  ".join(problems)


def test_every_module_has_a_floor() -> None:
    unknown = sorted({source.unit for source in PRODUCT if source.inside != PACKAGE} - set(FLOORS))
    assert not unknown, report(unknown, "not in FLOORS; decide what it may import and add it there:")


def test_modules_import_only_lower_floors_and_their_own_folder() -> None:
    problems = []
    for source in PRODUCT:
        for imported in source.imports:
            target = own_module(imported.module)
            if target is None or source.inside == PACKAGE:
                continue
            unit = target.split(".")[0]
            if unit != source.unit and FLOORS.get(unit, 99) >= FLOORS.get(source.unit, -1):
                relation = "a sibling" if FLOORS.get(unit) == FLOORS.get(source.unit) else "above it"
                problems.append(f"{source.name}:{imported.line} imports {target}, {relation}")
    rule = "a module knows only strictly lower floors; have floor 4 pass in what it needs (a callable, a Protocol):"
    assert not problems, report(problems, rule)


def test_no_file_takes_part_in_an_import_cycle() -> None:
    edges = {
        name: {
            target
            for imported in source.imports
            if (target := own_module(imported.module)) in MODULES and target != name
        }
        for name, source in MODULES.items()
    }
    problems = [" -> ".join([*cycle, cycle[0]]) for cycle in find_cycles(edges)]
    assert not problems, report(problems, "import cycles; move what both need into a third file:")


def test_the_search_for_cycles_finds_one() -> None:
    assert list(find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}})) == [["b", "c"]]
    assert list(find_cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()})) == []


def test_package_init_files_import_nothing() -> None:
    problems = [
        f"{source.name}:{imported.line} imports {imported.module}"
        for source in PRODUCT
        if source.path.name == "__init__.py"
        for imported in source.imports
    ]
    assert not problems, report(problems, "importing one file of a folder never brings in its neighbours:")


def test_torch_free_rooms_stay_free_of_heavy_libraries() -> None:
    problems = []
    for source in PRODUCT:
        if source.inside == PACKAGE or not source.inside.startswith(TORCH_FREE):
            continue
        for chain, library in heavy_imports(source):
            problems.append(f"{' -> '.join(chain)} imports {library}")
    assert not problems, report(
        problems, "these load where no deep-learning library is; pass in what they need from above:"
    )


def heavy_imports(source: Source) -> Iterator[tuple[list[str], str]]:
    """Heavy libraries that importing this file brings in, with the way there."""
    seen = {source.name}
    queue: list[tuple[Source, list[str]]] = [(source, [source.name])]
    while queue:
        current, chain = queue.pop()
        for imported in current.imports:
            library = imported.module.split(".")[0]
            if library in HEAVY_LIBRARIES and (current.inside, library) not in HEAVY_ALLOWED:
                yield [*chain[:-1], f"{chain[-1]}:{imported.line}"], imported.module
            target = MODULES.get(own_module(imported.module) or "")
            if target is not None and target.name not in seen:
                seen.add(target.name)
                queue.append((target, [*chain, target.name]))


def test_megatron_core_is_named_only_where_the_table_says() -> None:
    users = {
        source.inside: source
        for source in PRODUCT
        if any(imported.module.split(".")[0] == "megatron" for imported in source.imports)
    }
    unknown = sorted(set(users) - set(MEGATRON_FILES))
    assert not unknown, report(
        unknown, "names megatron; use what another file offers, or add it to MEGATRON_FILES and say what it takes:"
    )
    stale = sorted(set(MEGATRON_FILES) - set(users))
    assert not stale, report(stale, "no longer names megatron; take it out of MEGATRON_FILES:")


def test_nothing_names_megatron_training() -> None:
    problems = [
        f"{source.name}:{imported.line} imports {imported.module}"
        for source in EVERYTHING
        for imported in source.imports
        if imported.module.startswith("megatron.") and not f"{imported.module}.".startswith("megatron.core.")
    ]
    assert not problems, report(problems, "only megatron.core is a library; megatron.training is a program:")


def test_optional_libraries_stay_in_their_folders() -> None:
    problems = [
        f"{source.name}:{imported.line} imports {library}: only {PACKAGE}/{OPTIONAL_LIBRARIES[library]}/ may"
        for source in PRODUCT
        for imported in source.imports
        if (library := imported.module.split(".")[0]) in OPTIONAL_LIBRARIES
        and not f"{source.inside}/".startswith(f"{OPTIONAL_LIBRARIES[library]}/")
    ]
    assert not problems, report(problems, "libraries that may be absent:")


def test_environment_variables_are_read_only_in_platform() -> None:
    names = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
    problems = []
    for source in PRODUCT:
        if source.unit == "platform":
            continue
        problems += [
            f"{source.name}:{node.lineno} os.{node.attr}"
            for node in source.nodes
            if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
        ]
        problems += [
            f"{source.name}:{imported.line} {imported.module}"
            for imported in source.imports
            if imported.module in [f"os.{name}" for name in names]
        ]
    rule = "a setting is a key of the configuration; what a launcher tells comes from platform/:"
    assert not problems, report(problems, rule)


def test_only_the_loop_and_its_reporters_write_to_the_console() -> None:
    speakers = ("train", "scheduler", "monitor", "utils")
    problems = [
        f"{source.name}:{node.lineno} print"
        for source in PRODUCT
        if source.unit not in speakers
        for node in source.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not problems, report(problems, "a mechanism returns numbers, the scheduler says them:")


def test_files_stay_within_their_budget() -> None:
    sizes = {source.name: source.text.count("\n") for source in EVERYTHING}
    problems = [
        f"{name}: {lines} lines" for name, lines in sizes.items() if lines > MAX_FILE_LINES and name not in LONGER_FILES
    ]
    assert not problems, report(problems, f"over {MAX_FILE_LINES} lines; a file is one idea, so split it:")
    stale = [name for name in LONGER_FILES if sizes.get(name, 0) <= MAX_FILE_LINES]
    assert not stale, report(stale, "needs no exception any more, take it out of LONGER_FILES:")


def test_functions_stay_within_their_budget() -> None:
    sizes = {
        f"{source.name}::{node.name}": node.end_lineno - node.lineno + 1
        for source in EVERYTHING
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }
    problems = [
        f"{name}: {lines} lines"
        for name, lines in sizes.items()
        if lines > MAX_FUNCTION_LINES and name not in LONGER_FUNCTIONS
    ]
    assert not problems, report(
        problems, f"over {MAX_FUNCTION_LINES} lines; a function can be read aloud, so name its parts:"
    )
    stale = [name for name in LONGER_FUNCTIONS if sizes.get(name, 0) <= MAX_FUNCTION_LINES]
    assert not stale, report(stale, "needs no exception any more, take it out of LONGER_FUNCTIONS:")


def test_every_folder_has_a_readme() -> None:
    folders = {source.path.parent for source in PRODUCT} - {ROOT / PACKAGE} | {ROOT / name for name in README_FOLDERS}
    missing = sorted(folder.relative_to(ROOT).as_posix() for folder in folders if not (folder / "README.md").is_file())
    assert not missing, report(missing, "a short README.md says what it owns, the life of its data, how to change it:")


def test_every_file_says_what_it_owns() -> None:
    missing = [source.name for source in EVERYTHING if source.tree.body and not ast.get_docstring(source.tree)]
    missing = [name for name in missing if not name.startswith("tests/")]
    assert not missing, report(missing, "the first line is a docstring: what the file owns and what it does not:")


def test_public_functions_are_documented_and_typed() -> None:
    problems = []
    for source in PRODUCT + python_files("tools", "launch_scripts"):
        for node in source.tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            place = f"{source.name}:{node.lineno} {node.name}"
            if source in PRODUCT and not ast.get_docstring(node):
                problems.append(f"{place}: no docstring")
            problems += [f"{place}: {name} has no type" for name in untyped(node)]
    rule = "one sentence for every public function of the package, a type for every argument and result:"
    assert not problems, report(problems, rule)


def test_methods_are_typed() -> None:
    problems = []
    for source in PRODUCT:
        for node in source.nodes:
            if not isinstance(node, ast.ClassDef):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    names = [name for name in untyped(method) if name not in ("self", "cls")]
                    problems += [f"{source.name}:{method.lineno} {node.name}.{method.name}: {name}" for name in names]
    assert not problems, report(problems, "a type for every argument and result:")


def test_nothing_is_marked_as_unfinished() -> None:
    scripts = [
        path for folder in (".ci", "examples", "launch_scripts", "tools") for path in sorted((ROOT / folder).iterdir())
    ]
    texts = {source.name: source.text for source in EVERYTHING}
    texts |= {path.relative_to(ROOT).as_posix(): path.read_text(errors="replace") for path in scripts if path.is_file()}
    problems = [
        f"{name}:{number}: {line.strip()[:80]}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert not problems, report(problems, "what lands is finished; what is not there is refused by the configuration:")


def test_source_is_ascii() -> None:
    problems = [
        f"{source.name}:{number}: {line.strip()[:80]!a}"
        for source in EVERYTHING
        if not source.text.isascii()
        for number, line in enumerate(source.text.splitlines(), 1)
        if not line.isascii()
    ]
    assert not problems, report(
        problems, "a character that looks like another is hard to find; write an escape (\\u201c):"
    )
