import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]


def run_pytest(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_sample.py").write_text("import pytest\n" + source)
    command = [sys.executable, "-m", "pytest", "-p", "tests.rings", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(folder), "-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_rings_run_in_order_and_a_ring_that_is_empty_fails(tmp_path: Path) -> None:
    source = """
@pytest.mark.faults
def test_last(): pass
@pytest.mark.unit
def test_first(): pass
"""
    done = run_pytest(tmp_path, source, "-v", "--require-rings", "unit,faults")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.index("test_first PASSED") < done.stdout.index("test_last PASSED")
    assert "1 passed" in done.stdout.split("rings")[-1]
    missing = run_pytest(tmp_path, source, "--require-rings", "unit,numerics")
    assert missing.returncode == 4 and "no test of the ring numerics" in missing.stderr


def test_a_test_without_a_ring_is_refused(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "def test_nowhere(): pass\n")
    assert done.returncode == 4 and "test_nowhere has the rings none" in done.stderr
