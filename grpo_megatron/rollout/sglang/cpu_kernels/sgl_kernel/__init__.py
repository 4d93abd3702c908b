"""Own pure-torch stand-in for the CPU entry points of `sgl_kernel` that SGLang 0.5.23 imports when SGLANG_USE_CPU_ENGINE=1.

The wheel on PyPI (`sglang-kernel`) has CUDA objects only and there is no source package, so nothing there helps on a CPU.
Semantics follow the Triton reference kernels that stand next to each call site.  What is not here is really absent:
SGLang asks `hasattr(torch.ops.sgl_kernel, ...)` and takes its own torch path; without `convert_weight_packed` it also
treats an AMX machine like any other."""

import torch

from sgl_kernel import attention, cache, sampling, tree

__version__ = "0.0.0+cpu"

for _module in (cache, tree):  # imported by name: `from sgl_kernel import ..._cpu`
    globals().update({_k: _v for _k, _v in vars(_module).items() if _k.endswith("_cpu")})

for _name, _fn in {
    "decode_attention_cpu": attention.decode_attention_cpu,
    "extend_attention_cpu": attention.extend_attention_cpu,
    "reconstruct_indices_from_tree_mask_cpu": tree.reconstruct_indices_from_tree_mask,
    "murmur_hash32_cpu": sampling.murmur_hash32_cpu,
}.items():
    _fn.default = _fn  # called as torch.ops.sgl_kernel.<name>[.default](...)
    setattr(torch.ops.sgl_kernel, _name, _fn)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"sgl_kernel CPU stand-in: {name} is not implemented")
