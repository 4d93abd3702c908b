"""The `sglang:` section against SGLang's own source, and what is said where there is no SGLang."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_megatron.config import sglang_package
from grpo_megatron.config.sglang_fields import (
    OWNED_FIELDS,
    OWNED_GROUPS,
    check_sglang_section,
    what_to_set_instead,
)
from grpo_megatron.config.sglang_package import SglangPackage, find_sglang, read_sglang_fields
from tests.config.writing import load_text, only_problem, problems_of

pytestmark = pytest.mark.unit

INSTALLED = find_sglang().folder
needs_sglang = pytest.mark.skipif(INSTALLED is None, reason="SGLang is not installed")

SOURCES = {
    "srt/server_args.py": "class ServerArgs:\n    def check(self): ...\n",
    "srt/arg_groups/choices.py": """
BACKENDS = ["flashinfer", "triton"]
MORE = BACKENDS + ["wave"]
SOME = set(BACKENDS)
""",
    "srt/arg_groups/fields/schedule.py": """
class Schedule(Struct):
    _NS_PATH = "schedule"
    derived = Derived(doc="no field")
    mem_fraction_static: A[Optional[float], "help"] = None
    page_size: A[Optional[int], Arg(help="help", type_parser=number)] = None
    chunked_prefill_size: A[int | None, "help"] = None
    buckets: A[Optional[List[float]], "help"] = None
    labels: A[Dict[str, str], "help"] = {}
    graph: A[Optional[GraphConfig], "help"] = None
    mode: Literal["auto", "off"] = "auto"
    worker: Literal[1, 2] = 1
    backend: A[str, Arg(help="help", choices=MORE, aliases=["--the-backend"])] = "triton"
    sampler: A[str, Arg(help="help", choices=SOME)] = "triton"
    extra_config: A[str, "JSON"] = "{}"
    tp_size: A[int, Arg(help="help", aliases=["--tensor-parallel-size"])] = 1
    disable_overlap: A[bool, "help"] = False
    _explicitly_set: bool = False
""",
    "srt/arg_groups/fields/lora.py": "class Lora(Struct):\n    lora_paths: A[Optional[List[str]], 'help'] = None\n",
    "_version.py": "__version__: str\n\n__version__ = version = '9.8.7'\n",
}

REFUSED = [
    # name, value, part of the message, part of the fix
    ("page_sise", 1, "no such field", "did you mean page_size?"),
    ("tp_sise", 1, "no such field", "did you mean tp_size (not passed through: set modules.rollout.tensor)?"),
    ("derived", 1, "no such field", ""),
    ("_explicitly_set", True, "no such field", ""),
    ("zebra", 1, "no such field", ""),
    ("tp_size", 2, "not passed through", "set modules.rollout.tensor"),
    ("tensor-parallel-size", 2, "not passed through", "set modules.rollout.tensor"),
    ("--mem-fraction-static", 0.5, "not passed through", "modules.rollout.max_concurrent_rollouts"),
    ("lora_paths", ["x"], "not passed through", "published from the trainer"),
    ("the-backend", "wave", "no such field", "write  backend: wave"),
    ("page-size", 16, "no such field", "write  page_size: 16"),
    ("page_size", "16", "expected int or null, got '16'", ""),
    ("page_size", True, "expected int or null, got true", ""),
    ("chunked_prefill_size", 1.5, "expected int or null, got 1.5", ""),
    ("disable_overlap", 1, "expected bool, got 1", ""),
    ("buckets", 1, "expected list or null, got 1", "write  buckets: [1]"),
    ("labels", "a=b", "expected section, got 'a=b'", ""),
    ("graph", {"backend": "full"}, "expected GraphConfig or null, got a section", "cannot be written in a file"),
    ("extra_config", {"a": 1}, "expected str, got a section", "extra_config: '{...}'"),
    ("mode", "of", "expected 'auto' or 'off', got 'of'", ""),
    ("worker", 3, "expected 1 or 2, got 3", ""),
    ("backend", "flashinfr", "'flashinfr' is not known; SGLang has: flashinfer, triton, wave", "flashinfer?"),
]

PASSED = [
    ("page_size", 16),
    ("page_size", None),
    ("chunked_prefill_size", None),
    ("buckets", [1, 2.5]),
    ("labels", {"a": "b"}),
    ("mode", "off"),
    ("worker", 2),
    ("backend", "wave"),
    ("sampler", "one that a plug-in brings"),
    ("disable_overlap", True),
]


def write_sglang(folder: Path) -> Path:
    """A package with the layout of SGLang's, small."""
    for name, text in SOURCES.items():
        (folder / "sglang" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "sglang" / name).write_text(text)
    (folder / "sglang" / "__init__.py").write_text("raise RuntimeError('this must not be imported')\n")
    return folder / "sglang"


@pytest.fixture
def small_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only SGLang that this interpreter finds."""
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    find_sglang.cache_clear()
    yield write_sglang(tmp_path / "packages")
    find_sglang.cache_clear()


@pytest.fixture
def no_sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This interpreter finds none."""
    monkeypatch.setattr(sglang_package, "find_spec", lambda name: None)
    find_sglang.cache_clear()
    yield
    find_sglang.cache_clear()


@pytest.mark.parametrize(("name", "value", "message", "fix"), REFUSED)
def test_what_sglang_cannot_take_is_refused(
    small_sglang: Path, name: str, value: object, message: str, fix: str
) -> None:
    (refused,) = check_sglang_section({name: value}, None)
    assert refused[0] == name
    assert message in refused[1]
    assert fix in refused[2]


@pytest.mark.parametrize(("name", "value"), PASSED)
def test_what_sglang_takes_is_passed_on(small_sglang: Path, name: str, value: object) -> None:
    assert check_sglang_section({name: value}, None) == []


def test_refused_arguments_are_shown_with_their_lines(tmp_path: Path, small_sglang: Path) -> None:
    text = "modules:\n  rollout: {engine: sglang}\nsglang:\n  page_size: 1\n  tp_size: 2\n  pagesize: 2\n"
    problems = problems_of(tmp_path, text)
    assert [(problem.line, problem.key) for problem in problems] == [(5, "sglang.tp_size"), (6, "sglang.pagesize")]


def test_the_section_is_refused_as_a_whole_beside_another_engine(tmp_path: Path, small_sglang: Path) -> None:
    problem = only_problem(tmp_path, "modules:\n  rollout: {engine: megatron}\nsglang: {pagesize: 1}\n")
    assert (problem.line, problem.key) == (3, "sglang")
    assert "would be ignored, because modules.rollout.engine is megatron" in problem.message


def test_without_sglang_the_section_loads_and_nothing_is_said_about_its_names(tmp_path: Path, no_sglang: None) -> None:
    loaded = load_text(tmp_path, "modules: {rollout: {engine: sglang}}\nsglang: {pagesize: 1}\n")
    assert loaded.config.sglang == {"pagesize": 1}


def test_the_package_is_found_without_importing_it(small_sglang: Path) -> None:
    package = find_sglang()
    assert package == SglangPackage(small_sglang)
    assert package.version == "9.8.7"
    assert "sglang" not in sys.modules or sys.modules["sglang"].__file__ != str(small_sglang / "__init__.py")


def test_a_folder_that_only_has_the_name_is_not_taken_for_sglang(small_sglang: Path) -> None:
    (small_sglang / "srt" / "server_args.py").unlink()
    package = find_sglang()
    assert package.folder is None and package.version == ""
    assert "there is no srt/server_args.py in it" in package.message


def test_an_older_layout_with_all_fields_in_one_class_is_read(small_sglang: Path) -> None:
    for name in SOURCES:
        if "arg_groups" in name:
            (small_sglang / name).unlink()
    source = "class Other:\n    no: int\n\nclass ServerArgs:\n    page_size: Optional[int]\n    tp_size: int = 1\n"
    (small_sglang / "srt" / "server_args.py").write_text(source)
    read_sglang_fields.cache_clear()
    assert list(read_sglang_fields(small_sglang)) == ["page_size", "tp_size"]
    read_sglang_fields.cache_clear()


def write_python(folder: Path, *lines: str) -> str:
    """An interpreter that does these lines of shell."""
    script = folder / "python"
    script.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    script.chmod(0o755)
    return str(script)


def test_another_interpreter_is_asked_for_its_own_sglang(tmp_path: Path, no_sglang: None) -> None:
    folder = write_sglang(tmp_path / "elsewhere")
    python = write_python(tmp_path, f'PYTHONPATH={tmp_path / "elsewhere"} exec {sys.executable} "$@"')
    assert find_sglang(python) == SglangPackage(folder)
    text = f"modules: {{rollout: {{engine: sglang, python: {python}}}}}\n"
    problem = only_problem(tmp_path, text + "sglang: {pagesize: 1}\n")
    assert (problem.key, problem.fix) == ("sglang.pagesize", "did you mean page_size?")


def test_another_interpreter_does_not_take_sglang_from_the_folder_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sglang(tmp_path)
    monkeypatch.chdir(tmp_path)
    python = write_python(tmp_path, f'exec {sys.executable} -S "$@"')  # -S: without its packages
    assert "SGLang is not installed for" in find_sglang(python).message


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["exit 0"], "ended with exit code 0"),
        (["echo 'no such option' >&2", "exit 2"], "ended with exit code 2: no such option"),
        (["echo 'sglang is in'"], "SGLang is not installed for"),
        (["echo 'sglang is in /nowhere'"], "/nowhere is no SGLang"),
        (["echo something else first", "echo 'sglang is in /nowhere'"], "/nowhere is no SGLang"),
    ],
)
def test_an_interpreter_that_does_not_help_is_named_with_what_it_said(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    package = find_sglang(write_python(tmp_path, *lines))
    assert package.folder is None
    assert message in package.message
    assert package.fix


def test_an_interpreter_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_package, "_ANSWER_SECONDS", 0.2)
    package = find_sglang(write_python(tmp_path, "exec sleep 30"))
    assert package.folder is None
    assert "did not say within" in package.message


def test_what_is_no_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    assert "cannot be run" in find_sglang(str(tmp_path / "text")).message


@needs_sglang
def test_the_groups_of_the_installed_sglang_are_those_that_its_server_collects() -> None:
    assert INSTALLED is not None
    tree = ast.parse((INSTALLED / "srt" / "server_args.py").read_text())
    (collected,) = (
        statement.value.elts
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.List)
        and ast.unparse(statement.targets[0]) == "_INPUT_NAMESPACES"
    )
    groups = {field.group for field in read_sglang_fields(INSTALLED).values()}
    assert groups == {ast.unparse(name) for name in collected}
    assert set(OWNED_GROUPS) <= groups


@needs_sglang
def test_what_is_ours_are_fields_of_the_installed_sglang() -> None:
    assert INSTALLED is not None
    fields = read_sglang_fields(INSTALLED)
    assert sorted(set(OWNED_FIELDS) - set(fields)) == []
    ours = [name for name, field in fields.items() if what_to_set_instead(name, field.group)]
    assert len(ours) > 200 and len(fields) - len(ours) > 150


@needs_sglang
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("chunked_prefill_size", 2048, None),
        ("attention_backend", "triton", None),
        ("cuda_graph_bs_decode", [1, 2, 4], None),
        ("disable_cuda_graph", True, None),
        ("kv_cache_dtype", "auto", None),
        ("mem_fraction_static", 0.8, "max_concurrent_rollouts"),
        ("speculative_algorithm", "NEXTN", "modules.rollout.mtp_enabled"),
        ("api_key", "x", "the program sets it"),
        ("quantization", "fp8", "published"),
        ("disable_radix_cache", True, "share_prompt_prefix"),
        ("chat_template", "x", "token ids go in"),
        ("delete_ckpt_after_loading", True, "published"),
        ("hicache_storage_backend", "file", "outlive a publish"),
    ],
)
def test_well_known_arguments_of_the_installed_sglang(name: str, value: object, expected: str | None) -> None:
    refused = check_sglang_section({name: value}, None)
    if expected is None:
        assert refused == []
    else:
        assert expected in refused[0][2]


@needs_sglang
def test_reading_the_installed_sglang_imports_none_of_it() -> None:
    code = (
        "import sys\n"
        "from grpo_megatron.config.sglang_fields import check_sglang_section\n"
        "assert check_sglang_section({'page_sise': 1}, None)\n"
        "heavy = {'torch', 'sglang', 'msgspec'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
