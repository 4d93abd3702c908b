"""Text-only stand-in for torchvision, in one file.

SGLang's config package imports `torchvision.transforms` at module level even for a text model; the wheel on PyPI is linked
to CUDA, so next to a CPU torch its import dies (`operator torchvision::nms does not exist`) and takes transformers with it.
This one only has names: importing anything from it works, using an image operation raises."""

import enum
import sys
import types

__version__ = "0.28.0"  # what transformers reads for its feature checks


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise RuntimeError(f"{self.__name__}.{name}: torchvision is a text-only stand-in here")

        return missing


for _path in (
    "io",
    "ops",
    "ops.boxes",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    _m = _Module(f"{__name__}.{_path}")
    _m.__path__ = []
    _m.InterpolationMode = InterpolationMode
    sys.modules[_m.__name__] = _m
    _parent, _, _leaf = _m.__name__.rpartition(".")
    setattr(sys.modules[_parent], _leaf, _m)
