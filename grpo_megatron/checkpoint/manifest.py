"""The manifest of a checkpoint: what its files are, what made it, and whether it is whole. Imports no torch.

The manifest is written last. A folder without one, or whose files disagree with it, is not a checkpoint.
"""

import contextlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

MANIFEST_NAME = "manifest.json"
FORMAT = 1
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class FileRecord:
    num_bytes: int
    checksum: str
    """`crc32:` and 8 hexadecimal digits: finds damage at the speed of the disk; it is no protection from malice."""


@dataclass(frozen=True)
class Description:
    """What a run says about a checkpoint.

    Example:
        Description(policy_version=40, fingerprint="9f2c...", configuration="run:\\n  steps: 100\\n",
                    libraries={"torch": "2.13.0", "megatron-core": "0.16.1"},
                    layout={"world_size": 4, "tensor": 2, "pipeline": 2})
    """

    policy_version: int
    fingerprint: str
    configuration: str
    """The resolved configuration as YAML."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    version: int
    created: str
    description: Description
    files: Mapping[str, FileRecord]
    """By path below the checkpoint's folder, with forward slashes."""

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.files.values())


class InvalidManifest(ValueError):
    """The manifest is missing, damaged or of another format; the message says which."""


def installed_libraries(*names: str) -> dict[str, str]:
    """Versions for a description; a library that is not installed is left out."""
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def to_json(manifest: Manifest) -> str:
    """The text of the manifest file, with a checksum of itself."""
    body = {"format": FORMAT, **asdict(manifest)}
    return json.dumps({**body, "checksum": _checksum_of_body(body)}, indent=1, sort_keys=True) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest itself, not the files that it lists.

    Raises:
        InvalidManifest: it is not there, not whole, or of a format that this program does not know.
    """
    try:
        body = json.loads((folder / MANIFEST_NAME).read_text())
        checksum = body.pop("checksum")
    except FileNotFoundError:
        raise InvalidManifest(f"no {MANIFEST_NAME}: the save did not finish") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise InvalidManifest(f"{MANIFEST_NAME} cannot be read ({error})") from None
    if body.get("format") != FORMAT:
        raise InvalidManifest(f"{MANIFEST_NAME} has format {body.get('format')}, this program reads {FORMAT}")
    if checksum != _checksum_of_body(body):
        raise InvalidManifest(f"{MANIFEST_NAME} is damaged: its checksum is wrong")
    return Manifest(
        version=body["version"],
        created=body["created"],
        description=Description(**body["description"]),
        files={name: FileRecord(**record) for name, record in body["files"].items()},
    )


def find_size_problem(folder: Path, manifest: Manifest) -> str | None:
    """The quick check: every file is there with its size. Reads no contents."""
    for name, record in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != record.num_bytes:
            return f"{name} has {found} bytes instead of {record.num_bytes}"
    return None


def find_checksum_problem(folder: Path, manifest: Manifest, names: Iterable[str]) -> str | None:
    """The full check of the named files: reads all their contents."""
    for name in names:
        try:
            found = checksum_of_file(folder / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != manifest.files[name].checksum:
            return f"{name} is damaged: {found} instead of {manifest.files[name].checksum}"
    return None


def list_files(folder: Path) -> list[str]:
    """Every file below the folder but the manifest, sorted."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != MANIFEST_NAME)


def checksum_of_file(path: Path) -> str:
    """Of all its contents, in the form of `FileRecord.checksum`."""
    total = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            total = zlib.crc32(chunk, total)
    return f"crc32:{total:08x}"


def _checksum_of_body(body: Mapping[str, Any]) -> str:
    return f"crc32:{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"
