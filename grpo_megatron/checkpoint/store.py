"""Versions of a run's checkpoint on disk: written atomically, found by verification, thinned by retention.

Owns the folder `checkpoints/`; knows nothing of what a checkpoint means. One process (rank 0) holds the store; the
other ranks only write files into the temporary folder that it made. Imports no torch.

    .lock                            held while the job lives
    .tmp-version-000040-1f3a9c/      a save (or a deletion) in progress: of no value
    .old-version-000040-77be01/      what `version-000040` was before it was saved again; gone a moment later
    version-000040/                  complete
    set-aside-000060-5d20aa/         from a history that a roll-back left behind; never loaded, gone with the next save
    invalid-000060-c07714/           damaged and out of the way; nobody deletes it but the user
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.checkpoint.base import CheckpointError
from grpo_megatron.checkpoint.failures import explain_os_error, free_bytes, no_space
from grpo_megatron.checkpoint.lock import FolderLock
from grpo_megatron.checkpoint.manifest import (
    MANIFEST_NAME,
    Description,
    FileRecord,
    InvalidManifest,
    Manifest,
    find_size_problem,
    read_manifest,
    to_json,
)

_COMPLETE = re.compile(r"version-(\d{6,})")
_OLD = re.compile(r"\.old-(version-\d{6,})-[0-9a-f]+")
_SET_ASIDE = re.compile(r"set-aside-\d{6,}-[0-9a-f]+")
_SPARE_BYTES = 16 << 20
"""Asked for on top of the tensors: plans, headers, manifest."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete version whose manifest and file sizes were found right."""

    version: int
    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class SkippedVersion:
    """A folder that looks like a version and is not valid. It stays where it is."""

    version: int
    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path} is not a valid checkpoint and was skipped: {self.reason}"


@dataclass(frozen=True)
class Listing:
    valid: tuple[Checkpoint, ...]
    """Oldest first."""
    skipped: tuple[SkippedVersion, ...]

    @property
    def newest(self) -> Checkpoint | None:
        return self.valid[-1] if self.valid else None


@dataclass(frozen=True)
class PendingVersion:
    """A save in progress: ranks write below `path`."""

    version: int
    path: Path


@dataclass(frozen=True)
class CommitResult:
    checkpoint: Checkpoint
    removed: tuple[Path, ...]
    """Older versions that retention deleted, what had been set aside, and the version that this one replaced."""


def list_versions(folder: Path) -> Listing:
    """All versions in the folder by the quick check. Needs no lock and changes nothing."""
    valid: list[Checkpoint] = []
    skipped: list[SkippedVersion] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _COMPLETE.fullmatch(path.name)
        if match is None:
            continue
        try:
            manifest = read_manifest(path)
            problem = find_size_problem(path, manifest)
            if manifest.version != int(match[1]):
                problem = f"its manifest says version {manifest.version}"
        except InvalidManifest as error:
            problem = str(error)
        if problem is None:
            valid.append(Checkpoint(manifest.version, path, manifest))
        else:
            skipped.append(SkippedVersion(int(match[1]), path, problem))
    return Listing(tuple(sorted(valid, key=lambda checkpoint: checkpoint.version)), tuple(skipped))


class CheckpointStore:
    """The only writer of a checkpoint folder.

    Raises:
        CheckpointError: another job holds the folder, or it cannot be written.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        assert keep >= 1
        self.folder = folder
        self.keep = keep
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(folder)
        except OSError as error:
            raise explain_os_error(error, folder, "opening the checkpoint folder") from error
        self._clean_up_after_dead_jobs()

    def close(self) -> None:
        self._lock.release()

    def list(self) -> Listing:
        return list_versions(self.folder)

    def find(self, version: int) -> Checkpoint:
        """The version asked for.

        Raises:
            CheckpointError: it is not there or not valid; the message names those that are.
        """
        listing = self.list()
        for checkpoint in listing.valid:
            if checkpoint.version == version:
                return checkpoint
        reasons = [skipped.reason for skipped in listing.skipped if skipped.version == version]
        there = ", ".join(str(checkpoint.version) for checkpoint in listing.valid) or "none"
        what = f"is not valid: {reasons[0]}" if reasons else "does not exist"
        raise CheckpointError(f"{self.folder / _name(version)} {what}. Valid versions: {there}")

    def begin(self, version: int, *, needed_bytes: int) -> PendingVersion:
        """Make the temporary folder of a new version.

        Raises:
            CheckpointError: no space for `needed_bytes`, or the folder cannot be written. Nothing else has changed.
        """
        assert self._lock.is_held, "the store is closed"
        free = free_bytes(self.folder)
        if free < needed_bytes + _SPARE_BYTES:
            raise CheckpointError(no_space(self.folder, needed_bytes + _SPARE_BYTES, free))
        path = self.folder / f".tmp-{_name(version)}-{secrets.token_hex(4)}"
        try:
            path.mkdir()
        except OSError as error:
            raise explain_os_error(error, path, "starting a checkpoint", needed_bytes) from error
        return PendingVersion(version, path)

    def commit(
        self, pending: PendingVersion, description: Description, files: Mapping[str, FileRecord]
    ) -> CommitResult:
        """Write the manifest, make the version visible, delete what retention allows. The files are on disk already.

        Raises:
            CheckpointError: the disk is full or cannot be written; older versions are untouched.
        """
        created = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        manifest = Manifest(pending.version, created, description, dict(files))
        target = self.folder / _name(pending.version)
        try:
            _write_durably(pending.path / MANIFEST_NAME, to_json(manifest))
            for folder in {pending.path, *((pending.path / name).parent for name in files)}:
                flush_folder(folder)
            old = self._make_way(target, pending.version)
            pending.path.rename(target)
            flush_folder(self.folder)
        except OSError as error:
            raise explain_os_error(error, pending.path, "finishing a checkpoint") from error
        replaced = () if old is None else (target,)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        removed = replaced + self._retire(pending.version)
        return CommitResult(Checkpoint(pending.version, target, manifest), removed)

    def abort(self, pending: PendingVersion) -> None:
        """Give up a save: its folder goes, so that a full disk has room again."""
        shutil.rmtree(pending.path, ignore_errors=True)

    def set_aside_after(self, version: int, *, damaged: frozenset[int] = frozenset()) -> tuple[Path, ...]:
        """After a roll-back to `version`: later versions must not be found again.

        Valid ones go after the next commit. Invalid ones, and those that a full check found `damaged`, stay for good.
        """
        listing = self.list()
        moved = []
        for checkpoint in listing.valid:
            if checkpoint.version > version:
                kind = "invalid" if checkpoint.version in damaged else "set-aside"
                moved.append(self._rename(checkpoint.path, f"{kind}-{checkpoint.version:06d}"))
        for skipped in listing.skipped:
            if skipped.version > version:
                moved.append(self._rename(skipped.path, f"invalid-{skipped.version:06d}"))
        flush_folder(self.folder)
        return tuple(moved)

    def _rename(self, path: Path, name: str) -> Path:
        target = self.folder / f"{name}-{secrets.token_hex(4)}"
        path.rename(target)
        return target

    def _make_way(self, target: Path, version: int) -> Path | None:
        """Move an older folder of the same version out of the way; the next start mends a crash right after.

        Returns what may be deleted once the new version is there. An invalid one stays, under another name.
        """
        if not target.exists():
            return None
        if any(skipped.path == target for skipped in self.list().skipped):
            self._rename(target, f"invalid-{version:06d}")
            return None
        return self._rename(target, f".old-{target.name}")

    def _retire(self, newest: int) -> tuple[Path, ...]:
        """Delete valid versions beyond the newest `keep`, and what was set aside. Invalid ones stay."""
        valid = [checkpoint for checkpoint in self.list().valid if checkpoint.version <= newest]
        doomed = [checkpoint.path for checkpoint in valid[: -self.keep]]
        doomed += [path for path in sorted(self.folder.iterdir()) if _SET_ASIDE.fullmatch(path.name)]
        return tuple(path for path in doomed if _remove_version(path))

    def _clean_up_after_dead_jobs(self) -> None:
        """The lock is ours, so whoever made these is dead."""
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith(".tmp-"):
                shutil.rmtree(path, ignore_errors=True)
            elif match := _OLD.fullmatch(path.name):
                if (self.folder / match[1]).exists():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.rename(self.folder / match[1])


def flush_folder(folder: Path) -> None:
    """Make names in the folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _name(version: int) -> str:
    return f"version-{version:06d}"


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _remove_version(path: Path) -> bool:
    """Out of sight first: half a deletion must not look like a checkpoint. Returns whether it is out of sight."""
    doomed = path.with_name(f".tmp-removing-{path.name}-{secrets.token_hex(4)}")
    try:
        path.rename(doomed)
    except OSError:
        return False
    shutil.rmtree(doomed, ignore_errors=True)
    return True
