"""tools/install_sglang.sh with a Python that only pretends to install, in a copy of the files that it looks at."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
FILES = (
    "pyproject.toml",
    "setup.py",
    "constraints/cpu-python3.11.txt",
    "tools/environment.sh",
    "tools/install_sglang.sh",
)
TOOLS = "bash cat cp cut date df awk dirname env grep head ls mkdir mv rm sed sha256sum sleep sort tail touch tr"
PRETENDER = """#!/usr/bin/env bash
# `-m venv --clear FOLDER` makes a folder with this very script in it; `-m pip` notes its arguments; asked for a version
# it has one where something was installed; an import of SGLang fails where it is told to.
case "$*" in
    *version_info*) echo 3.11 ;;
    *"-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" && touch "${@: -1}/pyvenv.cfg" ;;
    *"-m pip"*) echo "$*" >>"$NOTES" ;;
    *m.version*) grep -qsE 'sglang==|\\[sglang\\]' "$NOTES" && echo 0.5.23 ;;
    *import*sglang*) echo "${FAKE_IMPORT_ERROR:-}"; [[ -z ${FAKE_IMPORT_ERROR:-} ]] ;;
esac
"""


class Machine:
    """A copy of the project, and a PATH on which only our Python is found, and a GPU only if there is to be one."""

    def __init__(self, folder: Path, *, has_gpu: bool) -> None:
        self.root, self.tools, self.notes = folder / "repository", folder / "bin", folder / "notes"
        for name in FILES:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        self.tools.mkdir()
        for tool in TOOLS.split():
            (self.tools / tool).symlink_to(shutil.which(tool))
        self.put("python3", PRETENDER)
        if has_gpu:
            self.put("nvidia-smi", "#!/usr/bin/env bash\n")

    def put(self, name: str, text: str) -> None:
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def install(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.tools), "NOTES": str(self.notes), "HOME": os.devnull} | variables
        command = [str(self.tools / "bash"), str(self.root / "tools/install_sglang.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def installations(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []


def test_without_a_gpu_sglang_comes_without_its_dependencies_and_what_it_imports_under_the_constraints(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path, has_gpu=False)
    done = machine.install()
    assert done.returncode == 0, done.stderr
    imports, engine = machine.installations()
    assert "--constraint" in imports and imports.endswith("[cpu,sglang-cpu]")
    assert engine.endswith("--no-deps sglang==0.5.23")
    again = machine.install()
    assert again.returncode == 0 and "nothing to install" in again.stdout
    assert len(machine.installations()) == 2


def test_with_a_gpu_it_is_the_extra_with_all_that_it_pins(tmp_path: Path) -> None:
    machine = Machine(tmp_path, has_gpu=True)
    assert machine.install().returncode == 0
    engine = machine.installations()[-1]
    assert engine.endswith("[sglang]") and "--constraint" not in engine and "--no-deps" not in engine
    before = len(machine.installations())
    assert "nothing to install" in machine.install().stdout
    assert len(machine.installations()) == before


def test_an_engine_that_cannot_be_imported_is_said_and_tried_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path, has_gpu=False)
    failed = machine.install(FAKE_IMPORT_ERROR="ImportError: libnothing.so")
    assert failed.returncode == 1 and "ImportError: libnothing.so" in failed.stderr
    assert "installed in" in machine.install().stdout


def test_another_environment_can_be_named_and_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, has_gpu=False)
    other = tmp_path / "documents"
    other.mkdir()
    (other / "letter").write_text("dear reader")
    refused = machine.install(str(other))
    assert refused.returncode == 1 and "neither empty nor a Python environment" in refused.stderr
    assert (other / "letter").read_text() == "dear reader" and not machine.installations()
    assert machine.install(str(tmp_path / "new")).returncode == 0
    assert (tmp_path / "new/bin/python").exists() and not (machine.root / ".venv").exists()


def test_wrong_usage_shows_what_is_right(tmp_path: Path) -> None:
    machine = Machine(tmp_path, has_gpu=False)
    assert machine.install("--help").returncode == 0
    wrong = machine.install("one", "two")
    assert wrong.returncode == 2 and "ENVIRONMENT" in wrong.stderr


def test_what_sglang_imports_without_a_gpu_is_pinned_within_its_range() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lines = (ROOT / "constraints/cpu-python3.11.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    pinned = {canonicalize_name(name): version for name, version in pairs}
    for requirement in map(Requirement, extras["sglang-cpu"]):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version), f"{requirement}, pinned is {version}"
    (engine,) = extras["sglang"]
    assert str(Requirement(engine).specifier).startswith("=="), "the kernels for a CPU are for one version"
