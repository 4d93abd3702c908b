"""The folder of SGLang's CPU kernels on somebody's path: never in the way of a real package, inert without its engine.

Each case runs in an interpreter of its own, so that nothing of it stays in the tests' process.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import grpo_megatron.rollout.sglang.cpu_kernels as cpu_kernels

pytestmark = pytest.mark.unit

FOLDER = Path(cpu_kernels.__file__).parent


def run(code: str, *, before: Path | None = None) -> str:
    """What the code prints, with the folder at the end of the path and `before` at its front."""
    start = f"import sys\nsys.path.append({str(FOLDER)!r})\n"
    if before is not None:
        start += f"sys.path.insert(0, {str(before)!r})\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", start + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def stub_of_sglang(folder: Path, *, is_cpu: bool, version: str) -> Path:
    """As much of SGLang as the plug-in asks before it changes anything; what it would change is missing."""
    return write(
        folder,
        {
            "sglang/__init__.py": "",
            "sglang/version.py": f"__version__ = {version!r}",
            "sglang/srt/__init__.py": "",
            "sglang/srt/utils.py": f"def is_cpu(): return {is_cpu}",
        },
    )


def test_a_real_package_of_the_same_name_comes_first(tmp_path: Path) -> None:
    write(tmp_path, {"sgl_kernel/__init__.py": "", "torchvision/__init__.py": "", "torchvision/transforms.py": ""})
    code = """
import sgl_kernel, torchvision, torchvision.transforms
print(sgl_kernel.__file__, torchvision.__file__, torchvision.transforms.__file__)
"""
    assert all(path.startswith(str(tmp_path)) for path in run(code, before=tmp_path).split())


def test_the_folder_holds_no_other_name_that_somebody_could_mean(tmp_path: Path) -> None:
    names = {path.name for path in FOLDER.iterdir() if not path.name.startswith("__")}
    assert names == {
        "README.md",
        "grpo_megatron_sglang_cpu",
        "grpo_megatron_sglang_cpu-1.0.dist-info",
        "sgl_kernel.py",
        "torchvision.py",
    }


def test_sglang_finds_the_plug_in_only_where_the_folder_is_on_the_path() -> None:
    code = """
from importlib.metadata import entry_points
find = lambda: [(e.name, e.value) for e in entry_points(group="sglang.srt.plugins") if "grpo" in e.name]
print(find())
sys.path.pop()
print(find())
"""
    expected = "[('grpo_megatron_sglang_cpu', 'grpo_megatron_sglang_cpu.plugin:activate')]"
    assert run(code).splitlines() == [expected, "[]"]


def test_the_plug_in_changes_nothing_where_sglang_does_not_run_on_a_cpu(tmp_path: Path) -> None:
    stub_of_sglang(tmp_path, is_cpu=False, version="9.9")
    code = """
from grpo_megatron_sglang_cpu.plugin import activate
before = set(sys.modules)
activate()
print(sorted(name for name in set(sys.modules) - before))
"""
    assert run(code, before=tmp_path).strip() == "['sglang', 'sglang.srt', 'sglang.srt.utils']"


def test_the_plug_in_changes_nothing_beside_a_real_sgl_kernel(tmp_path: Path) -> None:
    stub_of_sglang(write(tmp_path, {"sgl_kernel.py": "__version__ = '0.3.21'"}), is_cpu=True, version="9.9")
    code = "from grpo_megatron_sglang_cpu.plugin import activate; activate(); print('done')"
    assert run(code, before=tmp_path).strip() == "done"


@pytest.mark.parametrize(
    ("version", "message"),
    [("0.5.24", "are for SGLang 0.5.23, installed is 0.5.24"), ("0.5.23", "cannot be prepared for a CPU: Traceback")],
)
def test_another_version_or_a_change_that_fails_ends_the_process(tmp_path: Path, version: str, message: str) -> None:
    stub_of_sglang(tmp_path, is_cpu=True, version=version)
    code = """
from grpo_megatron_sglang_cpu.plugin import activate
try:
    activate()
except SystemExit as end:
    print(end.code)
"""
    assert message in run(code, before=tmp_path)


def test_operators_are_found_as_sglang_looks_for_them_and_missing_ones_are_missing() -> None:
    code = """
import torch, sgl_kernel
from sgl_kernel import verify_tree_greedy_cpu, copy_all_layer_kv_cache_cpu
hashed = torch.ops.sgl_kernel.murmur_hash32_cpu.default(torch.tensor([1]), torch.tensor([2]), torch.tensor([3, 4]))
print(tuple(hashed.shape), hasattr(torch.ops.sgl_kernel, "decode_attention_cpu"))
print(hasattr(torch.ops.sgl_kernel, "convert_weight_packed"))
try:
    from sgl_kernel import fp8_blockwise_scaled_mm
except ImportError as failure:
    print(failure)
"""
    lines = run(code).splitlines()
    assert lines[:2] == ["(1, 2) True", "False"]
    assert "fp8_blockwise_scaled_mm" in lines[2]


def test_names_of_torchvision_can_be_imported_and_images_cannot_be_made() -> None:
    code = """
from torchvision import transforms
from torchvision.transforms import InterpolationMode, Compose
from torchvision.transforms.v2 import functional as F
import torchvision.io, torchvision.ops.boxes
print(InterpolationMode.BICUBIC.value)
try:
    F.resize(None, [3, 3])
except RuntimeError as failure:
    print(failure)
"""
    assert run(code).splitlines() == [
        "bicubic",
        "torchvision.transforms.v2.functional.resize: images are not supported without a GPU",
    ]
