"""What makes megatron-core run where there is no CUDA device, and nothing else.

`install()` must run before anything of `megatron` is imported. Where CUDA is available it does nothing. Every
patch says what breaks without it. No source file of megatron-core is changed.
"""

import importlib.util
import logging
import os
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "randint", "as_tensor",
    "empty_like", "zeros_like", "ones_like", "full_like",
)  # fmt: skip


@cache
def install() -> bool:
    """Apply all patches once; returns whether any were needed."""
    if torch.cuda.is_available():
        return False
    assert not any(name == "megatron" or name.startswith("megatron.") for name in sys.modules), (
        "megatron_on_cpu.install() must run before megatron is imported"
    )
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # megatron's jit_fuser compiles with inductor: minutes on a CPU
    torch._dynamo.config.disable = True
    # That these libraries are absent is decided, and said, by `kernels.py`.
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*not installed.*")
    _redirect_devices()
    _redirect_streams_and_memory()
    _replace_missing_triton_module()
    _redirect_random_state()
    _relax_inference_checks()
    _repair_optional_imports()
    return True


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _redirect_devices() -> None:
    """megatron-core writes `device="cuda"`, `.cuda()` and `torch.cuda.current_device()` without asking."""
    from torch.utils._device import _device_constructors

    # `with torch.device(...)` matches functions against a cached set: fill it with the originals before they are
    # replaced, or transformers' meta initialisation silently loads wrong weights.
    _device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _without_cuda(getattr(torch, name)))
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.device_count = lambda: 1
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    # A copy: megatron's buffers resize the original to nothing after pinning.
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self.clone()
    original_to, original_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original_to(self, *args, **kwargs)

    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # The optimizer sorts parameters by the strings `torch.cuda.FloatTensor` and its like.
        if dtype is None and not args and not kwargs:
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        return original_type(self, dtype, *args, **kwargs)

    torch.Tensor.to, torch.Tensor.type = to, tensor_type


def _without_cuda(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return original(*args, **kwargs)

    factory.__name__ = original.__name__
    return factory


class _Stream:
    """CPU work is done when the call returns, so every wait is over at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def __exit__(self, *exception: Any) -> None: ...

    def record_event(self, event: Any = None) -> "_Event":
        return _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        return self


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _redirect_streams_and_memory() -> None:
    """Schedules, optimizers and timers synchronise streams and read memory counters."""
    stream = _Stream()
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **kwargs: stream
    torch.cuda.stream = lambda chosen: chosen if chosen is not None else stream
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(torch.cuda, name, lambda *args, **kwargs: 0)
    torch.cuda.memory_stats = lambda *args, **kwargs: defaultdict(int)
    nvtx = torch.cuda.nvtx
    nvtx.range_push = nvtx.range_pop = nvtx.mark = lambda *args, **kwargs: None


def _replace_missing_triton_module() -> None:
    """megatron-core >= 0.17 imports triton unconditionally for kernels of paged expert stashes."""
    if importlib.util.find_spec("triton") is not None:
        return
    name = "megatron.core.transformer.moe.ops.paged_stash"
    module = types.ModuleType(name)

    def missing(attribute: str) -> Callable[..., None]:
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def needs_triton(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"{name}.{attribute} needs triton")

        return needs_triton

    module.__getattr__ = missing  # type: ignore[method-assign]
    sys.modules.setdefault(name, module)


def _redirect_random_state() -> None:
    """The tensor-parallel random tracker saves and restores CUDA generator states."""
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    from megatron.core.tensor_parallel import random as tracker

    tracker._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    tracker._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # The tracker warns at each fork that the CPU state changed: here it is the device's state and meant to.
    logging.getLogger(tracker.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _relax_inference_checks() -> None:
    """Pipeline inference asserts that what it broadcasts is a CUDA tensor."""
    from megatron.core.inference import communication_utils

    communication_utils._is_cuda = lambda tensor: None
    communication_utils._is_cuda_contiguous = lambda tensor: None


def _repair_optional_imports() -> None:
    """Names that exist only if Transformer Engine could be imported, used where it could not."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if importlib.util.find_spec("transformer_engine") is None:
        from megatron.core.transformer import multi_latent_attention

        multi_latent_attention.HAVE_TE = False
