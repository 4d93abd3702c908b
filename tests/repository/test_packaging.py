"""pyproject.toml, the constraints and the source agree with each other."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.source_tree import PRODUCT, Source, python_files

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTION_OF = {"megatron": "megatron-core", "yaml": "pyyaml", "google": "protobuf"}
"""Where the name to import is not the name to install."""
OPTIONAL = {
    "sglang": "engine",
    "uvicorn": "comes with sglang, in whose process it is used",
    "vllm": "engine",
    "wandb": "extra wandb",
    "reasoning_gym": "extra reasoning-gym",
    "transformer_engine": "extra gpu",
    "flash_attn": "used where it is installed",
    "apex": "used where it is installed",
}


def requirements(*extras: str) -> list[Requirement]:
    """The project's own requirements, and those of these extras."""
    texts = [*PROJECT["dependencies"]]
    for extra in extras:
        texts += PROJECT["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


def pins() -> dict[str, str]:
    """Name -> version of constraints/."""
    lines = (ROOT / "constraints" / "cpu-python3.11.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_requirement_is_pinned_within_its_range() -> None:
    pinned = pins()
    for requirement in requirements("cpu", "test"):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is not in constraints/: install it in a fresh environment and add its pins"
        assert requirement.specifier.contains(version), f"{requirement} is not met by the pinned {version}"


def test_torch_has_an_upper_bound_and_no_local_version() -> None:
    (torch,) = (requirement for requirement in requirements() if requirement.name == "torch")
    assert any(specifier.operator in ("<", "==", "~=") for specifier in torch.specifier), str(torch)
    assert re.fullmatch(r"[0-9.]+", pins()["torch"]), "2.13.0+cpu exists in few places; 2.13.0 is met by it"


def third_party(sources: list[Source]) -> set[str]:
    """Top-level names of libraries that are imported without being ours or Python's."""
    names = {imported.module.split(".")[0] for source in sources for imported in source.imports}
    own = {"grpo_megatron", "grpo_megatron_sglang_cpu", "tests", "tools", "launch_scripts", "__future__"}
    return names - own - set(sys.stdlib_module_names)


def undeclared(names: set[str], declared: list[Requirement]) -> set[str]:
    known = {canonicalize_name(requirement.name) for requirement in declared}
    return {name for name in names if canonicalize_name(DISTRIBUTION_OF.get(name, name)) not in known}


def test_what_the_package_imports_is_declared() -> None:
    missing = undeclared(third_party(PRODUCT), requirements()) - set(OPTIONAL)
    assert not missing, f"imported and not in pyproject.toml's dependencies: {sorted(missing)}"


def test_what_tools_and_tests_import_is_declared() -> None:
    around = third_party(python_files("tools", "launch_scripts", "tests"))
    missing = (
        undeclared(around, requirements("cpu", "test")) - set(OPTIONAL) - {"tokenizers"}
    )  # comes with transformers
    assert not missing, f"imported and neither in the dependencies nor in the extras cpu and test: {sorted(missing)}"
