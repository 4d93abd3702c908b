"""Which optional kernel libraries are used is decided here, once, and said at start."""

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Kernels:
    transformer_engine: bool
    """Layers come from megatron-core's own Transformer Engine specs."""
    flash_attention: bool
    """The embedded engine reads its paged cache with flash-attn, else with `paged_attention.py`."""
    apex: bool
    """With Transformer Engine or apex, megatron-core takes their fused Adam, in this order; else torch's."""

    def describe(self) -> str:
        """One line for the log at start."""
        used = {
            "layers": "transformer_engine"
            if self.transformer_engine
            else "megatron-core local, attention on torch SDPA",
            "paged attention": "flash-attn" if self.flash_attention else "torch",
            "optimizer": "transformer_engine" if self.transformer_engine else "apex" if self.apex else "torch",
        }
        return ", ".join(f"{what}: {which}" for what, which in used.items())


@cache
def choose_kernels() -> Kernels:
    """A library counts only where there is a CUDA device: all three are CUDA code."""

    def usable(module: str) -> bool:
        return torch.cuda.is_available() and importlib.util.find_spec(module) is not None

    return Kernels(usable("transformer_engine"), usable("flash_attn"), usable("apex"))
