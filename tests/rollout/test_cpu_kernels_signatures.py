"""SGLang's CPU kernels and plug-in against the installed source: what it calls is there and takes what it gives."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import grpo_megatron.rollout.sglang.cpu_kernels.grpo_megatron_sglang_cpu.plugin as plugin
from grpo_megatron.rollout.sglang.cpu_kernels.grpo_megatron_sglang_cpu import attention, trees
from tests.rollout.sglang_source import SGLANG, definition, tree_of

pytestmark = [pytest.mark.unit, pytest.mark.skipif(SGLANG is None, reason="SGLang is not installed")]

STAND_IN = ast.parse((Path(plugin.__file__).parents[1] / "sgl_kernel.py").read_text())
ASKED_FOR_ON_A_CPU = (
    "kernels/ops/kvcache/cache_move.py",
    "kernels/ops/speculative/cache_locs.py",
    "kernels/ops/speculative/eagle.py",
    "kernels/ops/speculative/multi_layer_eagle.py",
    "kernels/ops/speculative/spec_tree.py",
    "srt/layers/attention/intel_amx_backend.py",
    "srt/mem_cache/allocation.py",
)
"""Files that import kernels for a CPU when they are imported, or when our attention backend starts."""


def calls(file: str, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == name:
            yield node


def assert_accepts(function: object, call: ast.Call) -> None:
    """Raises TypeError otherwise."""
    words = {word.arg: None for word in call.keywords if word.arg}
    inspect.signature(function).bind(*[None] * len(call.args), **words)  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ASKED_FOR_ON_A_CPU)
def test_kernels_that_are_imported_by_name_are_there(file: str) -> None:
    ours = {target.id for node in STAND_IN.body if isinstance(node, ast.Assign) for target in node.targets}  # type: ignore[attr-defined]
    asked = {
        alias.name
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ImportFrom) and node.module == "sgl_kernel"
        for alias in node.names
        if alias.name.endswith("_cpu")
    }
    assert asked and asked <= ours


def test_attention_takes_what_sglangs_backend_gives() -> None:
    backend = "srt/layers/attention/intel_amx_backend.py"
    for name, function in (
        ("decode_attention_fwd", attention.decode_attention),
        ("extend_attention_fwd", attention.extend_attention),
    ):
        (call,) = calls(backend, name)
        assert_accepts(function, call)


def test_verification_by_sampling_takes_what_speculative_decoding_gives() -> None:
    found = list(calls("srt/speculative/eagle_utils.py", "sampling_fn"))
    assert found
    for call in found:
        assert_accepts(trees.verify_by_sampling, call)


def test_what_the_plug_in_changes_is_there() -> None:
    """SGLang only logs a hook whose target it does not find."""
    text = Path(plugin.__file__).read_text()
    hooked = set(re.findall(r'"(sglang\.[\w.]+\.[\w.]+)"', text)) - {"sglang.srt.plugins"}
    assert len(hooked) >= 4
    for target in hooked:
        assert definition(target) is not None, target
    for name in re.findall(r"eagle_utils\.(\w+) =", text):
        assert definition(f"sglang.srt.speculative.eagle_utils.{name}") is not None, name
    for target in ("layernorm.RMSNorm.forward_native", "rotary_embedding.base.RotaryEmbedding.forward_native"):
        assert definition(f"sglang.srt.layers.{target}") is not None, target
