"""Saving and restoring a run on all its ranks. Every public method is collective over the world.

Rank 0 makes and renames folders; every rank writes, flushes and checks files; nothing counts before all agree.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from grpo_megatron.checkpoint.base import CheckpointError, Coordination, Stateful
from grpo_megatron.checkpoint.failures import explain_os_error
from grpo_megatron.checkpoint.manifest import (
    Description,
    FileRecord,
    Manifest,
    checksum_of_file,
    find_checksum_problem,
    list_files,
)
from grpo_megatron.checkpoint.run_state import RestoredState, load_run_state, save_run_state
from grpo_megatron.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    CommitResult,
    PendingVersion,
    SkippedVersion,
)

MODEL_FOLDER = "model"
STATE_FOLDER = "state"
_POLL_SECONDS = 0.2
Value = TypeVar("Value")


class Model(Protocol):
    """What `model_state.ModelState` offers; a test may have less behind it."""

    def num_bytes(self) -> int: ...
    def save(self, folder: Path, coordination: Coordination) -> None: ...
    def load(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class RunState:
    """Named owners of everything but the model."""

    shared: Mapping[str, Stateful] = field(default_factory=dict)
    """The same on all ranks: sampler, alerts, step, evaluations."""
    per_rank: Mapping[str, Stateful] = field(default_factory=dict)
    """Belongs to single ranks: random numbers."""


@dataclass(frozen=True)
class SaveReport:
    checkpoint: Checkpoint
    num_bytes: int
    seconds: float
    write_seconds: float
    """Of these, in `model/` and `state/`."""
    check_seconds: float
    """Of these, flushing to disk and computing checksums."""
    removed: tuple[Path, ...]


@dataclass(frozen=True)
class LoadReport:
    checkpoint: Checkpoint
    per_rank_state: RestoredState
    skipped: tuple[SkippedVersion, ...]
    """Newer folders that turned out not to be valid: worth a warning each."""
    seconds: float


def open_checkpointer(folder: Path, *, keep: int, coordination: Coordination) -> "Checkpointer":
    """Take the folder for this job. Collective over the world.

    Raises:
        CheckpointError: on every rank; another job holds the folder, or it cannot be written.
    """
    stores: list[CheckpointStore] = []
    error = None
    if coordination.rank == 0:
        error = _attempt(lambda: stores.append(CheckpointStore(folder, keep=keep)), "opening the checkpoint folder")
    coordination.agree(error, "opening the checkpoint folder")
    return Checkpointer(stores[0] if stores else None, coordination)


class Checkpointer:
    """`store` is given on rank 0 and None on all other ranks: see `open_checkpointer`."""

    def __init__(
        self, store: CheckpointStore | None, coordination: Coordination, *, visible_deadline_seconds: float = 60.0
    ) -> None:
        assert (store is not None) == (coordination.rank == 0)
        self._store = store
        self._coordination = coordination
        self._visible_deadline_seconds = visible_deadline_seconds
        self._damaged: frozenset[int] = frozenset()
        """Versions whose contents the full check refused though their sizes are right. The same on all ranks."""

    def save(self, version: int, model: Model, state: RunState, description: Description) -> SaveReport:
        """Save everything under this version.

        Raises:
            CheckpointError: on every rank; what was saved before is untouched and nothing is left of the attempt.
        """
        started = time.monotonic()
        needed = sum(self._coordination.gather(model.num_bytes()))
        pending: PendingVersion = self._on_rank_zero(
            lambda store: store.begin(version, needed_bytes=needed), "starting a checkpoint"
        )
        try:
            self._write(pending, model, state)
            written = time.monotonic()
            files = self._flush_and_describe(pending.path)
            checked = time.monotonic()
            result: CommitResult = self._on_rank_zero(
                lambda store: store.commit(pending, description, files), "finishing a checkpoint"
            )
        except BaseException:
            if self._store is not None:
                self._store.abort(pending)
            raise
        self._damaged -= {version}
        return SaveReport(
            checkpoint=result.checkpoint,
            num_bytes=result.checkpoint.manifest.num_bytes,
            seconds=time.monotonic() - started,
            write_seconds=written - started,
            check_seconds=checked - written,
            removed=result.removed,
        )

    def find(self, version: int | None = None) -> tuple[Checkpoint | None, tuple[SkippedVersion, ...]]:
        """The newest version that passes the full check, or the given one; None if there is none.

        Raises:
            CheckpointError: the given version is not there or not valid.
        """
        if version is not None:
            wanted: Checkpoint = self._on_rank_zero(lambda store: store.find(version), "looking for a checkpoint")
            problem = self._find_damage(wanted)
            if problem is not None:
                raise CheckpointError(f"{wanted.path} is not valid: {problem}")
            return wanted, ()
        listing = self._on_rank_zero(lambda store: store.list(), "looking for checkpoints")
        skipped = list(listing.skipped)
        for candidate in reversed(listing.valid):
            problem = self._find_damage(candidate)
            if problem is None:
                return candidate, tuple(folder for folder in skipped if folder.version > candidate.version)
            skipped.append(SkippedVersion(candidate.version, candidate.path, problem))
            self._damaged |= {candidate.version}
        return None, tuple(skipped)

    def load(self, version: int | None, model: Model, state: RunState) -> LoadReport | None:
        """Restore the newest valid version, or the given one. None: there is none, and nothing was touched.

        Raises:
            CheckpointError: on every rank; the version does not exist or does not fit this run, or there are versions
                and none is valid: whoever has trained for days does not want to begin anew without a word.
        """
        started = time.monotonic()
        checkpoint, skipped = self.find(version)
        if checkpoint is None and skipped:
            reasons = "\n".join(str(folder) for folder in skipped)
            raise CheckpointError(
                f"none of {len(skipped)} checkpoints is valid; move them away to start anew under this name\n{reasons}"
            )
        if checkpoint is None:
            return None
        model.load(checkpoint.path / MODEL_FOLDER)
        restored: list[RestoredState] = []
        self._on_every_rank(
            lambda: restored.append(
                load_run_state(
                    checkpoint.path / STATE_FOLDER,
                    shared=state.shared,
                    per_rank=state.per_rank,
                    rank=self._coordination.rank,
                    world_size=self._coordination.world_size,
                )
            ),
            "loading the run's state",
        )
        return LoadReport(checkpoint, restored[0], skipped, time.monotonic() - started)

    def set_aside_after(self, version: int) -> tuple[Path, ...]:
        """After a resume from `version`: later ones are not found again. Valid ones go with the next save."""
        damaged = self._damaged
        return self._on_rank_zero(
            lambda store: store.set_aside_after(version, damaged=damaged), "setting later checkpoints aside"
        )

    def close(self) -> None:
        """Give the folder free. Not collective."""
        if self._store is not None:
            self._store.close()

    def _write(self, pending: PendingVersion, model: Model, state: RunState) -> None:
        model_folder, state_folder = pending.path / MODEL_FOLDER, pending.path / STATE_FOLDER

        def make_folders(_: CheckpointStore) -> None:
            model_folder.mkdir()
            state_folder.mkdir()

        self._on_rank_zero(make_folders, "making the folders of a checkpoint")
        self._on_every_rank(lambda: self._wait_until_visible(state_folder), "looking for the folder of a checkpoint")
        model.save(model_folder, self._coordination)
        self._on_every_rank(
            lambda: save_run_state(
                state_folder, shared=state.shared, per_rank=state.per_rank, rank=self._coordination.rank
            ),
            "saving the run's state",
        )

    def _wait_until_visible(self, folder: Path) -> None:
        """A network file system shows a new folder late; a folder on rank 0's own disk never shows."""
        deadline = time.monotonic() + self._visible_deadline_seconds
        while not folder.is_dir():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{folder}, made by rank 0, did not appear within {self._visible_deadline_seconds:.0f} s: "
                    "run.folder must be a folder that all nodes share"
                )
            time.sleep(_POLL_SECONDS)

    def _flush_and_describe(self, folder: Path) -> dict[str, FileRecord]:
        """Every rank flushes and reads back its share of the files."""
        names = self._on_rank_zero(lambda _: list_files(folder), "listing the files of a checkpoint")
        mine: dict[str, FileRecord] = {}

        def describe_my_share() -> None:
            for name in self._my_share(names):
                _flush(folder / name)
                mine[name] = FileRecord((folder / name).stat().st_size, checksum_of_file(folder / name))

        self._on_every_rank(describe_my_share, "flushing the files of a checkpoint")
        return {name: record for part in self._coordination.gather(mine) for name, record in part.items()}

    def _find_damage(self, checkpoint: Checkpoint) -> str | None:
        """The full check, shared among the ranks; the same answer on all."""
        manifest: Manifest = checkpoint.manifest
        mine = find_checksum_problem(checkpoint.path, manifest, self._my_share(sorted(manifest.files)))
        return next((problem for problem in self._coordination.gather(mine) if problem is not None), None)

    def _my_share(self, names: Sequence[str]) -> Sequence[str]:
        return names[self._coordination.rank :: self._coordination.world_size]

    def _on_rank_zero(self, action: Callable[[CheckpointStore], Value], what: str) -> Value:
        """Rank 0 acts, all ranks get its answer or its error."""
        answer: list[Value] = []
        error = None
        if self._store is not None:
            store = self._store
            error = _attempt(lambda: answer.append(action(store)), what)
        self._coordination.agree(error, what)
        return self._coordination.from_rank_zero(answer[0] if answer else None)

    def _on_every_rank(self, action: Callable[[], object], what: str) -> None:
        self._coordination.agree(_attempt(action, what), what)


def _attempt(action: Callable[[], object], what: str) -> str | None:
    try:
        action()
    except (CheckpointError, ValueError) as error:
        return str(error)
    except OSError as error:
        return str(explain_os_error(error, Path(error.filename or "."), what))
    return None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
