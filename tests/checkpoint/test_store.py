import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_megatron.checkpoint.base import CheckpointError
from grpo_megatron.checkpoint.manifest import find_checksum_problem, read_manifest
from grpo_megatron.checkpoint.store import CheckpointStore, list_versions
from tests.checkpoint.stores import names, save_version, write_version

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[2]


def test_a_saved_version_is_found_with_its_manifest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    save_version(store, 40)
    newest = store.list().newest
    assert newest is not None and newest.version == 40
    assert newest.path.name == "version-000040"
    assert newest.manifest.description.fingerprint == "9f2c"
    assert newest.manifest.description.configuration == "run:\n  steps: 3\n"
    assert {name: record.num_bytes for name, record in newest.manifest.files.items()} == {
        "model/a.distcp": 7,
        "state.json": 2,
    }


def test_checksums_in_the_manifest_are_those_of_zlib(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save_version(store, 1, "123456789")
    manifest = read_manifest(tmp_path / "version-000001")
    assert manifest.files["model/a.distcp"].checksum == "crc32:cbf43926"  # the check value of CRC-32/ISO-HDLC


def test_versions_are_ordered_by_number_beyond_six_digits(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)
    for version in (999999, 1000000, 3):
        save_version(store, version)
    assert [checkpoint.version for checkpoint in store.list().valid] == [3, 999999, 1000000]


def test_retention_keeps_the_newest_versions_and_reports_what_it_deleted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    removed = [save_version(store, version).removed for version in (10, 20, 30)]
    assert removed == [(), (), (tmp_path / "version-000010",)]
    assert names(tmp_path) == ["version-000020", "version-000030"]


def test_retention_counts_only_valid_versions_and_leaves_invalid_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for version in (10, 20):
        save_version(store, version)
    (tmp_path / "version-000020" / "model" / "a.distcp").write_text("short")
    save_version(store, 30)
    assert names(tmp_path) == ["version-000010", "version-000020", "version-000030"]
    save_version(store, 40)
    assert names(tmp_path) == ["version-000020", "version-000030", "version-000040"]


def test_with_keep_one_the_old_version_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save_version(store, 10)
    write_version(store, 20)
    assert [checkpoint.version for checkpoint in store.list().valid] == [10]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "manifest.json").unlink(), "did not finish"),
        (lambda path: (path / "manifest.json").write_text('{"version": 2'), "cannot be read"),
        (lambda path: (path / "model" / "a.distcp").write_text("weig"), "model/a.distcp has 4 bytes instead of 7"),
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (lambda path: path.rename(path.with_name("version-000003")), "manifest says version 2"),
    ],
    ids=["no manifest", "half a manifest", "truncated file", "missing file", "renamed folder"],
)
def test_a_damaged_newest_version_is_skipped_and_says_why(tmp_path: Path, damage, reason: str) -> None:  # noqa: ANN001
    store = CheckpointStore(tmp_path, keep=3)
    save_version(store, 1)
    save_version(store, 2)
    damage(tmp_path / "version-000002")
    listing = store.list()
    assert listing.newest is not None and listing.newest.version == 1
    assert len(listing.skipped) == 1 and reason in str(listing.skipped[0])


def test_a_manifest_that_was_edited_is_not_believed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    save_version(store, 1)
    path = tmp_path / "version-000001" / "manifest.json"
    body = json.loads(path.read_text())
    body["description"]["fingerprint"] = "other"
    path.write_text(json.dumps(body))
    assert "its checksum is wrong" in store.list().skipped[0].reason


def test_one_flipped_bit_is_found_by_the_full_check_only(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    save_version(store, 1)
    file = tmp_path / "version-000001" / "model" / "a.distcp"
    file.write_bytes(b"weighss")
    manifest = store.list().valid[0].manifest
    problem = find_checksum_problem(tmp_path / "version-000001", manifest, manifest.files)
    assert problem is not None and problem.startswith("model/a.distcp is damaged")


def test_asking_for_a_version_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    save_version(store, 1)
    save_version(store, 2)
    with pytest.raises(CheckpointError, match=r"version-000007 does not exist. Valid versions: 1, 2"):
        store.find(7)
    (tmp_path / "version-000002" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"version-000002 is not valid: state.json is missing"):
        store.find(2)


def test_saving_a_version_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save_version(store, 1, "old")
    assert save_version(store, 1, "new one").removed == (tmp_path / "version-000001",)
    assert (tmp_path / "version-000001" / "model" / "a.distcp").read_text() == "new one"
    assert names(tmp_path) == ["version-000001"]


def test_a_crash_while_a_version_is_replaced_loses_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save_version(store, 1, "old")
    (tmp_path / "version-000001").rename(tmp_path / ".old-version-000001-aa")
    write_version(store, 1, "new")
    store.close()
    reopened = CheckpointStore(tmp_path, keep=2)
    assert (tmp_path / "version-000001" / "model" / "a.distcp").read_text() == "old"
    assert names(tmp_path) == ["version-000001"] and reopened.list().newest is not None


def test_temporary_folders_of_dead_jobs_go_at_the_next_start_and_listing_touches_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save_version(store, 1)
    write_version(store, 2)
    before = names(tmp_path)
    assert [checkpoint.version for checkpoint in list_versions(tmp_path).valid] == [1]
    assert names(tmp_path) == before and len(before) == 2
    store.close()
    CheckpointStore(tmp_path, keep=2)
    assert names(tmp_path) == ["version-000001"]


def test_versions_after_a_roll_back_are_not_found_again_and_go_with_the_next_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=9)
    for version in (1, 2, 3):
        save_version(store, version)
    moved = store.set_aside_after(1)
    assert len(moved) == 2 and all(path.is_dir() for path in moved)
    assert [checkpoint.version for checkpoint in store.list().valid] == [1]
    assert set(save_version(store, 2).removed) == set(moved)
    assert names(tmp_path) == ["version-000001", "version-000002"]


def test_invalid_versions_are_moved_out_of_the_way_and_never_deleted(tmp_path: Path) -> None:
    """Whether a roll-back or a new save of the same number meets them."""
    store = CheckpointStore(tmp_path, keep=1)
    save_version(store, 1)
    store.keep = 9
    for version in (2, 3, 4):
        save_version(store, version)
    (tmp_path / "version-000002" / "state.json").unlink()
    moved = store.set_aside_after(1, damaged=frozenset({3}))
    kinds = sorted(path.name.rsplit("-", 1)[0] for path in moved)
    assert kinds == ["invalid-000002", "invalid-000003", "set-aside-000004"]
    (tmp_path / "version-000001" / "manifest.json").unlink()
    save_version(store, 1)
    store.keep = 1
    save_version(store, 2)
    left = [name.rsplit("-", 1)[0] for name in names(tmp_path)]
    assert left == ["invalid-000001", "invalid-000002", "invalid-000003", "version"]


def test_an_aborted_save_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.abort(write_version(store, 1))
    assert names(tmp_path) == []


def test_too_little_space_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match=r"no space in .*: 1000000\.\d+ GB \(\d+ bytes\) needed, .* free"):
        store.begin(1, needed_bytes=10**15)
    assert names(tmp_path) == []


HOLD = """
import sys
from pathlib import Path
from grpo_megatron.checkpoint.store import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=1)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_job_on_the_folder_is_refused_until_the_first_is_dead(tmp_path: Path) -> None:
    """Not even a kill -9 leaves a lock behind."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=rf"in use by another job \(process {holder.pid} on host .*run.name"):
            CheckpointStore(tmp_path, keep=1)
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    CheckpointStore(tmp_path, keep=1).close()


def test_a_forked_child_does_not_hold_the_lock_of_its_parent(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(to_parent[1], b"x")
        os.read(to_child[0], 1)
        os._exit(0)
    try:
        os.read(to_parent[0], 1)
        store.close()
        CheckpointStore(tmp_path, keep=1).close()
    finally:
        os.write(to_child[1], b"x")
        os.waitpid(child, 0)
        for descriptor in (*to_child, *to_parent):
            os.close(descriptor)
