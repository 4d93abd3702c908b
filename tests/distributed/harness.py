"""Many multi-rank cases from one torchrun launch per world size.

A case is a function in `tests/distributed/cases_*.py`, marked with `@case(world_size=...)` and called on every rank
with a `CaseContext`. It fails by raising, on any rank. `test_cases.py` turns each into one pytest test.
"""

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

CASE_SECONDS = 120.0
ENGINE_CASE_SECONDS = 300.0
"""With engines in processes of their own, which take tens of seconds to start where cores are shared."""


@dataclass(frozen=True)
class CaseContext:
    """What a case gets: its rank, and a folder that is the same on all ranks and new for each case."""

    rank: int
    world_size: int
    folder: Path
    shared_folder: Path
    """The same for all cases of a launch; models made once lie here."""

    def groups(self, *, tensor: int = 1, pipeline: int = 1):  # noqa: ANN201
        """Build the process groups for this layout anew. Collective over the world."""
        from grpo_megatron.parallel.grid import RankGrid
        from grpo_megatron.parallel.groups import build_groups

        grid = RankGrid(self.world_size, tensor=tensor, pipeline=pipeline)
        return build_groups(grid, backend="gloo", timeout_seconds=CASE_SECONDS)


@dataclass(frozen=True)
class Case:
    name: str
    world_size: int
    with_engines: bool
    """Cases with engines of their own process are launched apart from the others."""
    run: Callable[[CaseContext], None]

    @property
    def seconds(self) -> float:
        return ENGINE_CASE_SECONDS if self.with_engines else CASE_SECONDS


_cases: list[Case] = []


def case(
    *, world_size: int, with_engines: bool = False
) -> Callable[[Callable[[CaseContext], None]], Callable[[CaseContext], None]]:
    """Register a case for one world size (use it twice for two)."""

    def register(function: Callable[[CaseContext], None]) -> Callable[[CaseContext], None]:
        area = function.__module__.rsplit("cases_", 1)[-1]
        _cases.append(Case(f"{area}.{function.__name__}", world_size, with_engines, function))
        return function

    return register


def all_cases() -> list[Case]:
    """Every case of every `cases_*.py` beside this file, in the order of files and definitions."""
    for path in sorted(Path(__file__).parent.glob("cases_*.py")):
        importlib.import_module(f"tests.distributed.{path.stem}")
    return list(_cases)


def run_worker(folder: Path, names: list[str]) -> None:
    """Run cases on this rank; result of case and rank goes to `<folder>/<case>/rank-N.json`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    seconds = max(one.seconds for one in all_cases() if one.name in names or not names)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shared_folder = folder / "shared"
    for current in all_cases():
        if current.world_size != world_size or (names and current.name not in names):
            continue
        case_folder = folder / current.name
        case_folder.mkdir(parents=True, exist_ok=True)
        shared_folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        error, begin = None, time.monotonic()
        try:
            current.run(CaseContext(rank, world_size, case_folder, shared_folder))
        except BaseException:  # noqa: BLE001 a case may fail in any way, and the next one still runs
            error = traceback.format_exc()
            print(f"case {current.name} rank {rank}\n{error}", file=sys.stderr, flush=True)
        (case_folder / f"rank-{rank}.json").write_text(
            json.dumps({"error": error, "seconds": time.monotonic() - begin})
        )
        errors: list = [None] * world_size
        dist.all_gather_object(errors, error)
        if any(errors) and not all(errors):
            # The ranks may stand at different collectives now: nothing after this can be trusted.
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    from grpo_megatron.platform.megatron_on_cpu import install

    install()
    # Cases register with the module that they import, not with this script's copy of it.
    from tests.distributed import harness

    harness.run_worker(Path(sys.argv[1]), sys.argv[2:])
