"""HF folder to megatron-core checkpoint (torch_dist) and back; what was written is read again and compared.

    python tools/convert_checkpoint.py hf-to-megatron HF_FOLDER TARGET [--tensor N] [--pipeline N] [--dtype bfloat16]
    python tools/convert_checkpoint.py megatron-to-hf SOURCE HF_FOLDER [--companions HF_FOLDER]

hf-to-megatron writes TARGET/model (torch_dist, readable in any parallel layout), the HF configuration and tokenizer
beside it and conversion.json with the checksum of every tensor, so that megatron-to-hf needs nothing else. SOURCE may
also be a run's checkpoint (checkpoints/version-000040); its configuration and tokenizer then come from --companions.
--tensor and --pipeline split the work over as many processes, for models that one process cannot hold; the files mean
the same. Exit codes: 0 done, 1 refused or failed, 2 wrong usage.
"""

import argparse
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from grpo_megatron.platform.megatron_on_cpu import install

install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from tqdm import tqdm  # noqa: E402

from grpo_megatron.checkpoint.base import CheckpointError  # noqa: E402
from grpo_megatron.checkpoint.coordination import WorldCoordination  # noqa: E402
from grpo_megatron.checkpoint.model_state import ModelState  # noqa: E402
from grpo_megatron.families.base import ModelDescription  # noqa: E402
from grpo_megatron.families.counting import check_divides  # noqa: E402
from grpo_megatron.families.describe import describe  # noqa: E402
from grpo_megatron.families.stages import stage_layers  # noqa: E402
from grpo_megatron.models.build import DTYPES, BuildSettings, build_policy  # noqa: E402
from grpo_megatron.parallel.collectives import agree  # noqa: E402
from grpo_megatron.parallel.errors import RankFailure  # noqa: E402
from grpo_megatron.parallel.grid import RankGrid  # noqa: E402
from grpo_megatron.parallel.groups import Groups, build_groups  # noqa: E402
from grpo_megatron.platform.device import current_platform  # noqa: E402
from grpo_megatron.platform.kernels import choose_kernels  # noqa: E402
from grpo_megatron.weights.checksum import checksum  # noqa: E402
from grpo_megatron.weights.export import CONVERSION_NAME, copy_companions, export_hf  # noqa: E402
from grpo_megatron.weights.gather import WeightWalk  # noqa: E402
from grpo_megatron.weights.hf_files import HfCheckpoint  # noqa: E402
from grpo_megatron.weights.load import load_hf  # noqa: E402

TIMEOUT_SECONDS = 3600.0
GRACE_SECONDS = 10.0
_STORED_DTYPES: dict[str, Literal["bfloat16", "float32"]] = {"BF16": "bfloat16", "F32": "float32"}
Refusals = (ValueError, OSError, RankFailure, CheckpointError)


@dataclass(frozen=True)
class Conversion:
    """What to do; the same on every rank."""

    direction: Literal["hf-to-megatron", "megatron-to-hf"]
    source: Path
    target: Path
    companions: Path
    """HF folder with configuration and tokenizer."""
    description: ModelDescription
    dtype: Literal["bfloat16", "float32"]
    tensor: int
    pipeline: int

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline


@dataclass(frozen=True)
class Outcome:
    num_tensors: int
    num_bytes: int


def main(arguments: list[str]) -> int:
    parsed = _parse(arguments)
    try:
        conversion = _plan(parsed)
        if conversion.num_ranks == 1:
            with tempfile.TemporaryDirectory() as folder:
                return run_rank(0, conversion, str(Path(folder) / "store"))
        return _run_processes(conversion)
    except Refusals as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1


def run_rank(rank: int, conversion: Conversion, store_file: str) -> int:
    """One rank's part of the conversion; returns the exit code."""
    start = time.monotonic()
    try:
        platform = current_platform(rank)
        store = dist.FileStore(store_file, conversion.num_ranks)
        timeout = timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group(
            platform.backend, store=store, rank=rank, world_size=conversion.num_ranks, timeout=timeout
        )
        grid = RankGrid(conversion.num_ranks, conversion.tensor, conversion.pipeline)
        groups = build_groups(grid, backend=platform.backend, timeout_seconds=TIMEOUT_SECONDS)
        convert = hf_to_megatron if conversion.direction == "hf-to-megatron" else megatron_to_hf
        outcome = convert(conversion, groups)
        dist.destroy_process_group()
    except Refusals as error:
        if rank == 0:
            print(f"failed: {error}", file=sys.stderr)
        return 1
    if rank == 0:
        print(
            f"{conversion.target}: {outcome.num_tensors} tensors, {outcome.num_bytes / 1e6:,.1f} MB in "
            f"{conversion.dtype}; read again, all {outcome.num_tensors} checksums agree with {conversion.source} "
            f"({time.monotonic() - start:.1f} s)"
        )
    return 0


def hf_to_megatron(conversion: Conversion, groups: Groups) -> Outcome:
    """Load, save, wipe the model, load what was saved, compare with the HF files. Collective over the world."""
    partial = conversion.target.with_name(f".{conversion.target.name}.partial")
    chunks = _build(conversion, groups)
    num_own_bytes = sum(parameter.nbytes for chunk in chunks for parameter in chunk.parameters())
    try:
        with _progress("reading", num_own_bytes, groups) as advance:
            load_hf(chunks, conversion.description, conversion.source, groups=groups, on_tensor=advance)
        _on_rank_zero(groups, lambda: _make_target(partial, conversion.companions), "making the target folder")
        state = ModelState(chunks, None)
        with _announced(f"writing {num_own_bytes / 1e6:,.1f} MB per rank", groups):
            state.save(partial / "model", WorldCoordination(groups))
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(float("nan"))
        with _announced("reading it again", groups):
            state.load(partial / "model")
        walk = WeightWalk(chunks, conversion.description, groups)
        checksums = _checksums(walk, groups)
        _on_rank_zero(groups, lambda: _compare_with_hf(checksums, conversion.source, conversion), "comparing")
        _on_rank_zero(groups, lambda: _finish(conversion, partial, checksums), "finishing")
    except Refusals:
        if groups.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return Outcome(len(walk.entries), sum(entry.num_bytes for entry in walk.entries))


def megatron_to_hf(conversion: Conversion, groups: Groups) -> Outcome:
    """Load, export, read the exported files again and compare. Collective over the world."""
    chunks = _build(conversion, groups)
    with _announced(f"reading {conversion.source / 'model'}", groups):
        ModelState(chunks, None).load(conversion.source / "model")
    walk = WeightWalk(chunks, conversion.description, groups)
    checksums = _checksums(walk, groups)
    _on_rank_zero(groups, lambda: _compare_with_note(checksums, conversion), "comparing with the conversion's note")
    total = sum(entry.num_bytes for entry in walk.entries)
    with _progress("writing", total, groups) as advance:
        export_hf(
            chunks,
            conversion.description,
            conversion.target,
            source_folder=conversion.companions,
            groups=groups,
            on_tensor=advance,
        )

    def compare() -> None:
        try:
            _compare_with_hf(checksums, conversion.target, conversion)
        except ValueError:
            shutil.rmtree(conversion.target)
            raise

    _on_rank_zero(groups, compare, "reading the exported files again")
    return Outcome(len(walk.entries), total)


def _build(conversion: Conversion, groups: Groups) -> list[torch.nn.Module]:
    settings = BuildSettings(conversion.dtype, "model")
    platform = current_platform(groups.rank)
    return list(build_policy(conversion.description, settings, groups, platform, choose_kernels()))


def _checksums(walk: WeightWalk, groups: Groups) -> dict[str, int]:
    """Of every HF tensor of the model, on rank 0. Collective over the world."""
    found: dict[str, int] = {}
    with _progress("checking", sum(entry.num_bytes for entry in walk.entries), groups) as advance:
        for entry, tensor in walk.tensors():
            if groups.rank == 0:
                found[entry.name] = checksum(tensor)
            advance(entry.num_bytes)
    return found


def _compare_with_hf(checksums: dict[str, int], folder: Path, conversion: Conversion) -> None:
    dtype = DTYPES[conversion.dtype]
    with HfCheckpoint(folder) as files:
        _raise_different(
            [name for name, value in checksums.items() if checksum(files.read_whole(name).to(dtype)) != value], folder
        )


def _compare_with_note(checksums: dict[str, int], conversion: Conversion) -> None:
    """A converted model must still have the checksums that were noted then; a run's checkpoint has no note."""
    path = conversion.source / CONVERSION_NAME
    note = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if note.get("dtype") == conversion.dtype:
        _raise_different([name for name, value in checksums.items() if note["checksums"].get(name) != value], path)


def _raise_different(names: list[str], where: Path) -> None:
    if names:
        raise ValueError(f"{len(names)} tensors differ from {where}, first {names[0]}; the conversion was taken back")


def _make_target(partial: Path, companions: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "model").mkdir(parents=True)
    copy_companions(companions, partial)


def _finish(conversion: Conversion, partial: Path, checksums: dict[str, int]) -> None:
    note = {"format": 1, "dtype": conversion.dtype, "source": conversion.source.name, "checksums": checksums}
    (partial / CONVERSION_NAME).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    partial.rename(conversion.target)


def _on_rank_zero(groups: Groups, action: Callable[[], None], what: str) -> None:
    """Rank 0 acts, all hear how it went. Collective over the world."""
    error = None
    if groups.rank == 0:
        try:
            action()
        except (OSError, ValueError) as problem:
            error = str(problem)
    agree(error, groups.world, what)


@contextmanager
def _progress(what: str, total: int, groups: Groups) -> Iterator[Callable[[int], None]]:
    """A bar with rate and remaining time, on rank 0."""
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=groups.rank != 0, mininterval=0.5) as bar:
        yield lambda num_bytes: bar.update(num_bytes) and None


@contextmanager
def _announced(what: str, groups: Groups) -> Iterator[None]:
    """For what cannot count its own progress."""
    start = time.monotonic()
    if groups.rank == 0:
        print(f"{what} ...", file=sys.stderr, flush=True)
    yield
    if groups.rank == 0:
        print(f"{what}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)


def _run_processes(conversion: Conversion) -> int:
    """One process per rank; the first failure ends the others, which would wait for it otherwise."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store_file = str(Path(folder) / "store")
        processes = [
            spawn.Process(target=_run_and_exit, args=(rank, conversion, store_file))
            for rank in range(conversion.num_ranks)
        ]
        for process in processes:
            process.start()
        while any(process.exitcode is None for process in processes) and not any(p.exitcode for p in processes):
            time.sleep(0.1)
        end = time.monotonic() + GRACE_SECONDS
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
    return max(abs(process.exitcode or 0) for process in processes) and 1


def _run_and_exit(rank: int, conversion: Conversion, store_file: str) -> None:
    torch.set_num_threads(1)
    sys.exit(run_rank(rank, conversion, store_file))


def _plan(parsed: argparse.Namespace) -> Conversion:
    """Everything that can be refused before a model is built.

    Raises:
        ValueError: naming path or option and the fix.
    """
    source, target = Path(parsed.source), Path(parsed.target)
    if target.exists():
        raise ValueError(f"{target} exists already; remove it or choose another folder")
    if parsed.direction == "hf-to-megatron":
        companions = source
        description = describe(companions)
        dtype = parsed.dtype or _dtype_of_files(source)
    else:
        if not (source / "model").is_dir():
            raise ValueError(f"{source / 'model'}: not there; expected a converted model or a run's checkpoint")
        companions = Path(parsed.companions or source)
        description = describe(companions)
        dtype = parsed.dtype or _dtype_of_note(source)
    check_divides(description, tensor=parsed.tensor)
    stage_layers(description.num_layers, parsed.pipeline, 0)
    return Conversion(parsed.direction, source, target, companions, description, dtype, parsed.tensor, parsed.pipeline)


def _dtype_of_files(folder: Path) -> Literal["bfloat16", "float32"]:
    with HfCheckpoint(folder) as files:
        stored = {tensor.dtype for name, tensor in files.tensors.items() if not name.endswith(".inv_freq")}
    if len(stored) != 1 or not stored <= set(_STORED_DTYPES):
        raise ValueError(f"{folder} holds {', '.join(sorted(stored))}: say --dtype bfloat16 or --dtype float32")
    return _STORED_DTYPES[stored.pop()]


def _dtype_of_note(folder: Path) -> Literal["bfloat16", "float32"]:
    path = folder / CONVERSION_NAME
    if not path.is_file():
        raise ValueError(f"{path} is not there (a run's checkpoint has none): say --dtype bfloat16 or --dtype float32")
    dtype = json.loads(path.read_text(encoding="utf-8")).get("dtype")
    if dtype not in DTYPES:
        raise ValueError(f"{path}: dtype is {dtype!r}")
    return dtype


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=("hf-to-megatron", "megatron-to-hf"))
    parser.add_argument("source")
    parser.add_argument("target", help="must not exist")
    parser.add_argument("--tensor", type=_positive, default=1, help="tensor-parallel processes (default 1)")
    parser.add_argument("--pipeline", type=_positive, default=1, help="pipeline-parallel processes (default 1)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: as stored")
    parser.add_argument("--companions", help="HF folder with configuration and tokenizer, if SOURCE has none")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
