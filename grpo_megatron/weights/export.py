"""Writes the policy as an HF folder: weights from the agreed walk, everything else copied from the source folder."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from grpo_megatron.families.base import ModelDescription
from grpo_megatron.parallel.collectives import agree
from grpo_megatron.parallel.errors import RankFailure
from grpo_megatron.parallel.groups import Groups
from grpo_megatron.weights.gather import WalkEntry, WeightWalk
from grpo_megatron.weights.hf_files import INDEX_NAME, SINGLE_NAME

DEFAULT_FILE_BYTES = 2 * 1024**3
CONVERSION_NAME = "conversion.json"
"""What the conversion tool notes beside a converted model."""
# Weights in any format, what belongs to another copy of them, and the model card of the model before training.
_WEIGHT_ENDINGS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_NOT_COPIED = (*_WEIGHT_ENDINGS, CONVERSION_NAME, "README.md")


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Example:
        >>> ExportReport(Path("exports/step-40"), num_tensors=272, num_bytes=269, num_files=1, seconds=2.0).num_files
        1
    """

    folder: Path
    num_tensors: int
    num_bytes: int
    num_files: int
    seconds: float


def export_hf(
    chunks: Sequence[torch.nn.Module],
    description: ModelDescription,
    folder: Path,
    *,
    source_folder: Path,
    groups: Groups,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
    on_tensor: Callable[[int], None] | None = None,
) -> ExportReport:
    """Write `folder`, which must not exist, by rank 0. Collective over the world.

    It appears whole or not at all: files are written beside it and renamed at the end.

    Args:
        source_folder: HF folder whose configuration, tokenizer and license are copied.
        on_tensor: called with the bytes of each tensor (progress).

    Raises:
        RankFailure: on every rank, if the folder cannot be written.
    """
    start = time.monotonic()
    walk = WeightWalk(chunks, description, groups)
    files = _plan_files(walk.entries, max_file_bytes)
    writer = _FolderWriter(Path(folder), Path(source_folder), files) if groups.rank == 0 else None
    what = f"export to {folder}"
    try:
        agree(_attempt(None if writer is None else writer.begin), groups.world, what)
        tensors = walk.tensors()
        for index, entries in enumerate(files):
            contents = {}
            for _ in entries:
                entry, tensor = next(tensors)
                if writer is not None:
                    contents[entry.name] = tensor.cpu().clone()
                if on_tensor is not None:
                    on_tensor(entry.num_bytes)
            agree(_attempt(None if writer is None else writer.write, index, contents), groups.world, what)
        agree(_attempt(None if writer is None else writer.finish), groups.world, what)
    except RankFailure:
        if writer is not None:
            writer.discard()
        raise
    num_bytes = sum(entry.num_bytes for entry in walk.entries)
    return ExportReport(Path(folder), len(walk.entries), num_bytes, len(files), time.monotonic() - start)


def copy_companions(source: Path, target: Path) -> None:
    """Copy what an HF folder holds beside its weights: configuration, tokenizer, license."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, target / path.name)


class _FolderWriter:
    """The files of one export; exists on rank 0 only and makes no collective call."""

    def __init__(self, folder: Path, source_folder: Path, files: list[list[WalkEntry]]) -> None:
        self._folder, self._source_folder, self._files = folder, source_folder, files
        self._partial = folder.with_name(f".{folder.name}.partial")

    def begin(self) -> None:
        if self._folder.exists():
            raise FileExistsError(f"{self._folder} exists already; remove it or choose another folder")
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        copy_companions(self._source_folder, self._partial)
        self._state_dtype(self._partial / "config.json")

    def write(self, index: int, contents: dict[str, torch.Tensor]) -> None:
        save_file(contents, self._partial / self._file_name(index), metadata={"format": "pt"})

    def finish(self) -> None:
        if len(self._files) > 1:
            index = {
                "metadata": {"total_size": sum(entry.num_bytes for entries in self._files for entry in entries)},
                "weight_map": {
                    entry.name: self._file_name(i) for i, entries in enumerate(self._files) for entry in entries
                },
            }
            (self._partial / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        self._partial.rename(self._folder)

    def discard(self) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    def _file_name(self, index: int) -> str:
        return SINGLE_NAME if len(self._files) == 1 else f"model-{index + 1:05d}-of-{len(self._files):05d}.safetensors"

    def _state_dtype(self, path: Path) -> None:
        """config.json names the dtype of the weights; transformers 5 writes `dtype`, older ones `torch_dtype`."""
        config = json.loads(path.read_text(encoding="utf-8"))
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = str(self._files[0][0].dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _plan_files(entries: Sequence[WalkEntry], max_file_bytes: int) -> list[list[WalkEntry]]:
    """Runs of the walk that fit into one file; a larger tensor has a file to itself."""
    files: list[list[WalkEntry]] = []
    room = 0
    for entry in entries:
        if not files or entry.num_bytes > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(entry)
        room -= entry.num_bytes
    return files


def _attempt(action: Callable[..., None] | None, *arguments: Any) -> str | None:
    """Run the writer's part, if this rank has one; the error as text, for `agree`."""
    if action is None:
        return None
    try:
        action(*arguments)
    except Exception as error:  # noqa: BLE001 whatever it is, the other ranks wait to hear of it
        return f"{type(error).__name__}: {error}"
    return None
