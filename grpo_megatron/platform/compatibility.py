"""Whatever differs between the supported versions of megatron-core (0.16.1 on Python 3.11, 0.19 on 3.12)."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

MEGATRON_CORE_VERSION = tuple(int(part) for part in version("megatron-core").split(".")[:2])


@contextmanager
def generating() -> Iterator[None]:
    """Around generation: newer versions keep a process-wide inference flag that would spoil the next update."""
    try:
        from megatron.core.inference.utils import InferenceMode  # absent in 0.16
    except ImportError:
        yield
        return
    InferenceMode.set_active()
    try:
        yield
    finally:
        InferenceMode.unset_active()
