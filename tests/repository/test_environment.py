"""tools/environment.sh with a Python that only pretends to install, in a copy of the files that it looks at."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
TOOLS = "bash cat cp cut date df awk grep head mkdir mv rm sha256sum sleep sort tail tr"
PRETENDER = """#!/usr/bin/env bash
# `-m venv --clear FOLDER` makes a folder with this very script in it; `-m pip` notes its arguments.
case "$*" in
    *version_info*) echo "${FAKE_VERSION:-3.11}" ;;
    *"-m venv"*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
    *"-m pip"*)
        echo "$*" >>"$NOTES"
        if [[ -n ${FAKE_PIP_ERROR:-} ]]; then echo "$FAKE_PIP_ERROR"; exit 1; fi
        ;;
    *ensurepip*) [[ -z ${FAKE_NO_VENV:-} ]] ;;
esac
"""


class Repository:
    """A folder with what decides about the environment, and a PATH on which only our Python is found."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "repository"
        (self.root / "constraints").mkdir(parents=True)
        for name in ("pyproject.toml", "setup.py", "constraints/cpu-python3.11.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.tools = folder / "bin"
        self.tools.mkdir()
        for tool in TOOLS.split():
            (self.tools / tool).symlink_to(shutil.which(tool))
        (self.tools / "python3").write_text(PRETENDER)
        (self.tools / "python3").chmod(0o755)
        self.notes = folder / "notes"

    def prepare(self, extras: str, **variables: str) -> subprocess.CompletedProcess[str]:
        script = f'set -euo pipefail; root=$PWD; source "{ROOT}/tools/environment.sh"; prepare_environment {extras}'
        environment = {"PATH": str(self.tools), "NOTES": str(self.notes), "HOME": os.devnull} | variables
        command = [str(self.tools / "bash"), "-c", script]
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=60)

    def installations(self) -> list[str]:
        return self.notes.read_text().splitlines() if self.notes.exists() else []


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_a_second_call_installs_nothing_and_says_so(repository: Repository) -> None:
    assert repository.prepare("cpu,test").returncode == 0
    again = repository.prepare("cpu")
    assert again.returncode == 0 and "nothing to install" in again.stdout
    assert len(repository.installations()) == 1


def test_installation_is_always_under_the_constraints(repository: Repository) -> None:
    repository.prepare("cpu")
    (command,) = repository.installations()
    assert "--constraint" in command and "constraints/cpu-python3.11.txt" in command


def test_another_extra_is_added_and_none_is_lost(repository: Repository) -> None:
    repository.prepare("cpu")
    repository.prepare("test")
    assert repository.installations()[1].endswith("[test,cpu]")
    assert "nothing to install" in repository.prepare("cpu,test").stdout
    with (repository.root / "setup.py").open("a") as file:
        file.write("# changed\n")
    repository.prepare("cpu")
    assert repository.installations()[2].endswith("[cpu,test]"), "each extra once"


def test_a_changed_requirement_installs_again(repository: Repository) -> None:
    repository.prepare("cpu")
    with (repository.root / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    assert "installing" in repository.prepare("cpu").stdout


def test_a_failed_installation_is_not_taken_for_a_good_one(repository: Repository) -> None:
    assert repository.prepare("cpu", FAKE_PIP_ERROR="ERROR: something").returncode == 1
    assert "installing" in repository.prepare("cpu").stdout


@pytest.mark.parametrize(
    ("pip_says", "message"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("NewConnectionError: Temporary failure in name resolution", "the package index cannot be reached"),
    ],
)
def test_the_usual_troubles_are_named(repository: Repository, pip_says: str, message: str) -> None:
    result = repository.prepare("cpu", FAKE_PIP_ERROR=pip_says)
    assert result.returncode == 1
    assert message in result.stderr and pip_says in result.stderr


def test_an_old_python_is_refused_by_version(repository: Repository) -> None:
    result = repository.prepare("cpu", FAKE_VERSION="3.9")
    assert result.returncode == 1 and "python3 is 3.9" in result.stderr
    assert not (repository.root / ".venv").exists()


def test_a_python_without_venv_is_refused_with_the_package_to_install(repository: Repository) -> None:
    result = repository.prepare("cpu", FAKE_NO_VENV="1")
    assert result.returncode == 1 and "apt-get install python3.11-venv" in result.stderr


def test_too_little_disk_space_is_said_before_anything_is_made(repository: Repository) -> None:
    (repository.tools / "df").unlink()
    (repository.tools / "df").write_text("#!/usr/bin/env bash\necho head\necho /dev/disk 9 9 12 9% /\n")
    (repository.tools / "df").chmod(0o755)
    result = repository.prepare("cpu")
    assert result.returncode == 1 and "12 MB are free" in result.stderr
    assert not (repository.root / ".venv").exists()
