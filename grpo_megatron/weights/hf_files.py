"""Reading side of an HF folder's safetensors: what is there, and slices of it, without loading whole files."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_READABLE_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies and what its header says.

    Example:
        >>> StoredTensor("model.safetensors", (151, 64), "BF16").shape
        (151, 64)
    """

    file: str
    shape: tuple[int, ...]
    dtype: str


class HfCheckpoint:
    """The safetensors of one HF folder, opened (memory-mapped) until closed.

    Raises:
        ValueError: no safetensors, a file that the index names is not there, or a damaged file; all at once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.absent: set[str] = set()
        """Names that the index lists and no file holds."""
        self._files: dict[str, Any] = {}
        problems: list[str] = []
        listed = _read_index(folder)
        for file in sorted(set(listed.values())) if listed else [_single_file(folder)]:
            problems += self._open(file)
        if problems:
            self.close()
            raise ValueError("\n".join(problems))
        self.absent = set(listed) - set(self.tensors)

    def __enter__(self) -> "HfCheckpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._files.clear()

    def read(self, name: str, *, axis: int, start: int, stop: int) -> torch.Tensor:
        """Rows (axis 0) or columns (axis 1) [start, stop) of a tensor; only these bytes are read."""
        stored = self.tensors[name]
        part = self._files[stored.file].get_slice(name)
        assert axis in (0, 1), axis
        try:
            return part[start:stop] if axis == 0 else part[:, start:stop]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.folder / stored.file}: {name} cannot be read: {error}") from None

    def read_whole(self, name: str) -> torch.Tensor:
        return self._files[self.tensors[name].file].get_tensor(name)

    def _open(self, file: str) -> list[str]:
        path = self.folder / file
        if not path.is_file():
            return [f"{path}: named in {INDEX_NAME} but not there; copy the folder again"]
        try:
            opened = safe_open(path, framework="pt")
            names = list(opened.keys())
            self._files[file] = opened
            for name in names:
                part = opened.get_slice(name)
                self.tensors[name] = StoredTensor(file, tuple(part.get_shape()), str(part.get_dtype()))
        except (SafetensorError, OSError) as error:
            size = path.stat().st_size
            return [f"{path}: damaged or cut off ({size} bytes): {error}; copy the file again"]
        return [
            f"{path}: {name} has dtype {self.tensors[name].dtype}; only {', '.join(_READABLE_DTYPES)} can be trained"
            for name in names
            if self.tensors[name].dtype not in _READABLE_DTYPES and not name.endswith(".inv_freq")
        ]


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> file, or nothing where there is no index."""
    path = folder / INDEX_NAME
    if not path.is_file():
        return {}
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        assert isinstance(listed, dict) and listed and all(isinstance(file, str) for file in listed.values())
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AssertionError):
        raise ValueError(f"{path}: no valid index: expected JSON with a `weight_map`") from None
    return listed


def _single_file(folder: Path) -> str:
    if (folder / SINGLE_NAME).is_file():
        return SINGLE_NAME
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = f"; {others[0]} is another format: load it with transformers and save it again" if others else ""
    raise ValueError(f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} is there{hint}")
