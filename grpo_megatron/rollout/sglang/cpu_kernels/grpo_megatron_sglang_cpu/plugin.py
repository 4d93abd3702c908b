"""SGLang's plug-in: what its engine lacks on a CPU. SGLang calls `activate` in each of its processes.

It does nothing unless SGLang runs on a CPU (SGLANG_USE_CPU_ENGINE=1) with the `sgl_kernel` of this folder. It changes
functions of one SGLang version, so it ends the process on any other, and when a change fails: SGLang itself would log
that and go on without.
"""

import ctypes
import importlib.util
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SGLANG_VERSION = "0.5.23"


def activate() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return
    from sglang.version import __version__

    kernels = importlib.util.find_spec("sgl_kernel")
    if kernels is None or kernels.origin != str(Path(__file__).parents[1] / "sgl_kernel.py"):
        return
    if __version__ != SGLANG_VERSION:
        raise SystemExit(f"the kernels for SGLang on a CPU are for SGLang {SGLANG_VERSION}, installed is {__version__}")
    try:
        for change in _CHANGES:
            change()
    except Exception as failure:
        raise SystemExit(f"SGLang {__version__} cannot be prepared for a CPU: {traceback.format_exc()}") from failure


def _serve_attention() -> None:
    """`attention_backend: torch_native` becomes SGLang's Intel backend, on the operators of our `sgl_kernel`.

    Upstream's torch_native is slower and has no draft workers.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    @register_attention_backend("torch_native")
    def make(runner: Any) -> Any:
        from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend

        return IntelAMXAttnBackend(runner)

    def serve_drafts(
        original: Callable[..., Any], self: Any, field: str, backends: dict, *rest: Any, **named: Any
    ) -> Any:
        if "intel_amx" in backends:
            backends.setdefault("torch_native", backends["intel_amx"])
        return original(self, field, backends, *rest, **named)

    create = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    HookRegistry.register(create, serve_drafts, HookType.AROUND)


def _sample_with_seeds() -> None:
    """`sampling_seed` counts always. Upstream ignores it unless inference is deterministic, which no CPU backend is."""
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .sampler import SeededSampler
    from .sampling import seeds_of

    def add_seeds(info: Any, cls: type, batch: Any, vocab_size: int) -> None:
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        info.sampling_seed = seeds_of(seeds, [request.rid for request in batch.reqs])

    make = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(make, add_seeds, HookType.AFTER)
    register_sampler_backend("pytorch", SeededSampler)


def _verify_by_sampling() -> None:
    """Speculative decoding draws from the target's distribution; upstream takes the largest logit on every CPU."""
    from sglang.srt.speculative import eagle_utils

    from . import sampling, trees

    eagle_utils.tree_speculative_sampling_target_only = trees.verify_by_sampling
    eagle_utils.top_k_renorm_prob = sampling.renormalize_top_k
    eagle_utils.top_p_renorm_prob = sampling.renormalize_top_p
    eagle_utils._verify_uses_greedy = lambda *, is_all_greedy, **device: is_all_greedy


def _compute_logits() -> None:
    """`enable_fp32_lm_head` without converting the whole head in each step."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .head import float32_logits

    def compute(original: Callable[..., Any], self: Any, hidden: Any, head: Any, *rest: Any, **named: Any) -> Any:
        weight = getattr(head, "weight", None)
        plain = self.use_fp32_lm_head and weight is not None and not hasattr(head, "set_lora")
        if plain and weight.dtype in (torch.bfloat16, torch.float16):
            return float32_logits(hidden, weight)
        return original(self, hidden, head, *rest, **named)

    target = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
    HookRegistry.register(target, compute, HookType.AROUND)


def _replace_layers() -> None:
    """RMSNorm and rotary embedding in fewer operations. A derived layer with a computation of its own keeps it."""
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    from .layers import normalize, rotate

    norm, rope = RMSNorm.forward_native, RotaryEmbedding.forward_native

    def forward_norm(self: Any, x: Any, residual: Any = None, *rest: Any, **named: Any) -> Any:
        special = self.cast_x_before_out_mul or self.fp32_residual or self.override_orig_dtype is not None
        special = special or self.variance_size_override is not None or x.shape[-1] != self.hidden_size
        if special or any(one is not None for one in (*rest, *named.values())):
            return norm(self, x, residual, *rest, **named)
        normalized, total = normalize(x, residual, self.weight, self.variance_epsilon)
        return normalized if residual is None else (normalized, total)

    def forward_rope(self: Any, positions: Any, query: Any, key: Any, *rest: Any, **named: Any) -> Any:
        special = not self.is_neox_style or self.rotary_dim != self.head_size or hasattr(self, "sin_cos_cache")
        special = special or query.dim() != 2 or key.dim() != 2
        if special or any(one is not None for one in (*rest, *named.values())):
            return rope(self, positions, query, key, *rest, **named)
        return rotate(positions, query, key, self.cos_sin_cache)

    RMSNorm.forward_native, RotaryEmbedding.forward_native = forward_norm, forward_rope


def _reuse_freed_memory() -> None:
    """glibc gives temporaries of some MB back to the kernel at once, and gets every page of them again by a fault."""
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(mmap_threshold, 32 * 1024 * 1024)  # glibc's limit
        library.mallopt(trim_threshold, 128 * 1024 * 1024)


def _repair_devices() -> None:
    """Two places that forget that there may be no GPU."""
    import torch
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def make_rope(original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """DeepSeek without YaRN: upstream asserts that there is a scaling."""
        given = inspect.signature(original).bind(*arguments, **named).arguments
        scaling = given.get("rope_scaling")
        if scaling is None or scaling.get("rope_type", "default") == "default":
            given.pop("device", None)
            return factory.get_rope(**given)
        return original(*arguments, **named)

    HookRegistry.register("sglang.srt.layers.rotary_embedding.factory.get_rope_cpu", make_rope, HookType.AROUND)
    if not torch.cuda.is_available():  # draft workers of DeepSeek and GLM synchronize whatever the device
        torch.cuda.synchronize = lambda device=None: None


_CHANGES = (
    _serve_attention,
    _sample_with_seeds,
    _verify_by_sampling,
    _compute_logits,
    _replace_layers,
    _reuse_freed_memory,
    _repair_devices,
)
