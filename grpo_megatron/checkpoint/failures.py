"""What the operating system said, in the user's terms: path, bytes needed and free, what to do. Imports no torch."""

import errno
import shutil
from pathlib import Path

from grpo_megatron.checkpoint.base import CheckpointError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}


def free_bytes(folder: Path) -> int:
    """What this user may still write on the folder's file system."""
    return shutil.disk_usage(folder).free


def no_space(folder: Path, needed_bytes: int | None, free: int) -> str:
    """A full disk in one sentence, with what to do about it."""
    needed = "" if needed_bytes is None else f"{needed_bytes / 1e9:.3f} GB ({needed_bytes} bytes) needed, "
    return (
        f"no space in {folder}: {needed}{free / 1e9:.3f} GB ({free} bytes) free. "
        "Free some, lower checkpoint.keep, or choose another run.folder"
    )


def explain_os_error(error: OSError, path: Path, what: str, needed_bytes: int | None = None) -> CheckpointError:
    """`path`: where it happened, unless the error itself knows better."""
    if error.errno in _FULL:
        existing = next(folder for folder in (path, *path.parents) if folder.is_dir())
        return CheckpointError(f"{what}: {no_space(existing, needed_bytes, free_bytes(existing))}")
    where = error.filename or path
    if error.errno in _NOT_WRITABLE:
        return CheckpointError(
            f"{what}: {where} cannot be written ({error.strerror}). Make it writable or choose another run.folder"
        )
    return CheckpointError(f"{what}: {where}: {error.strerror or error}")


def explain_failure(error: BaseException, path: Path, what: str) -> CheckpointError:
    """The same for an error that may only remember where it came from, as those of torch's serialiser do."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return CheckpointError(f"{what}: {path}: {error}") if cause is None else explain_os_error(cause, path, what)
