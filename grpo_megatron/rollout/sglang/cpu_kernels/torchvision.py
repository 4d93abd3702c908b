"""Names of torchvision, for text models only: importing from it works, using an image operation raises.

SGLang's configuration package imports `torchvision.transforms` whatever the model. The real one is linked to CUDA and
cannot be imported beside a torch without CUDA.
"""

import enum
import sys
import types
from typing import Any

__version__ = "0.28.0"  # transformers compares it
__path__: list[str] = []  # makes this file a package

_MODULES = (
    "io",
    "ops",
    "ops.boxes",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
)


class InterpolationMode(enum.Enum):
    """Read by transformers and SGLang when they are imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Names(types.ModuleType):
    """A module that has every name; what a name stands for cannot be used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def unusable(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(f"{self.__name__}.{name}: images are not supported without a GPU")

        return unusable


def _add_modules() -> None:
    for path in _MODULES:
        module = _Names(f"{__name__}.{path}")
        module.__path__ = []
        module.InterpolationMode = InterpolationMode
        sys.modules[module.__name__] = module
        parent, _, leaf = module.__name__.rpartition(".")
        setattr(sys.modules[parent], leaf, module)


_add_modules()
