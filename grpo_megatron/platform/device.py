"""One small interface over CUDA and CPU: device, communication backend, memory, pinning, random numbers."""

import gc
import os
import random
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import psutil
import torch


@dataclass(frozen=True)
class Platform:
    """The machine as the rest of the program sees it."""

    kind: Literal["cuda", "cpu"]
    device: torch.device
    backend: str
    """Backend string for torch.distributed; CPU tensors always go over gloo."""

    def memory_used_bytes(self) -> int:
        """Bytes in use on the device, other processes included; on CPU this process's resident memory."""
        if self.kind == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return total - free
        return psutil.Process().memory_info().rss

    def memory_total_bytes(self) -> int:
        if self.kind == "cuda":
            return torch.cuda.mem_get_info(self.device)[1]
        return psutil.virtual_memory().total

    def synchronize(self) -> None:
        """Wait for everything that was launched on the device."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    def release_cached_memory(self) -> None:
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in page-locked host memory; on CPU the tensor itself."""
        return tensor.pin_memory() if self.kind == "cuda" else tensor

    def seed_everything(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)


@cache
def current_platform(local_rank: int = 0) -> Platform:
    """CUDA where there is a device, else CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return Platform("cuda", device, "cpu:gloo,cuda:nccl")
    return Platform("cpu", torch.device("cpu"), "gloo")


def use_deterministic_algorithms() -> None:
    """Same input, same bits: forbids kernels whose result depends on timing."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is refused, see torch's notes
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
