"""Small checkpoints without a model, for tests of the store and of what can go wrong with a disk."""

from pathlib import Path

from grpo_megatron.checkpoint.manifest import Description, FileRecord, checksum_of_file, list_files
from grpo_megatron.checkpoint.store import CheckpointStore, CommitResult, PendingVersion

DESCRIPTION = Description(policy_version=1, fingerprint="9f2c", configuration="run:\n  steps: 3\n")


def write_version(store: CheckpointStore, version: int, text: str = "weights") -> PendingVersion:
    """A save up to the moment before its commit."""
    pending = store.begin(version, needed_bytes=len(text))
    (pending.path / "model").mkdir()
    (pending.path / "model" / "a.distcp").write_text(text)
    (pending.path / "state.json").write_text("{}")
    return pending


def describe_files(folder: Path) -> dict[str, FileRecord]:
    return {
        name: FileRecord((folder / name).stat().st_size, checksum_of_file(folder / name)) for name in list_files(folder)
    }


def save_version(store: CheckpointStore, version: int, text: str = "weights") -> CommitResult:
    pending = write_version(store, version, text)
    return store.commit(pending, DESCRIPTION, describe_files(pending.path))


def names(folder: Path) -> list[str]:
    """What lies in the folder, without the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")
