"""Folders of checkpoints without a training run: what stays, what goes, and how files take their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_exo.checkpoints import retention
from megatron_exo.checkpoints.integrity import (
    FORMAT_VERSION,
    MANIFEST,
    damages,
    digest_of,
    leave_digest,
    sha256_of,
    take_digest,
)
from megatron_exo.checkpoints.reading import TRACKER, folder_of, steps_of
from megatron_exo.checkpoints.retention import DELETED, remove_old
from megatron_exo.files import replacing


def make(root: Path, step: int, *, whole: bool = True) -> Path:
    """A folder with one file; with a manifest if it is to be whole."""
    folder = folder_of(root, step)
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"x" * step)
    if whole:
        files = {"__0_0.distcp": {"bytes": step, "sha256": sha256_of(folder / "__0_0.distcp")}}
        content = {"format_version": FORMAT_VERSION, "files": files}
        (folder / MANIFEST).write_text(json.dumps({"sha256": digest_of(content), **content}))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with whole checkpoints of every second iteration up to 12."""
    for step in range(2, 14, 2):
        make(tmp_path, step)
    return tmp_path


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (1, None, [12]),
        (2, None, [10, 12]),
        (5, None, [4, 6, 8, 10, 12]),
        (9, None, [2, 4, 6, 8, 10, 12]),
        (1, 4, [4, 8, 12]),
        (2, 6, [6, 10, 12]),
        (1, 5, [10, 12]),
    ],
)
def test_the_newest_and_the_multiples_stay(root: Path, keep_last: int, keep_every: int | None, kept: list[int]) -> None:
    gone = remove_old(root, 12, keep_last=keep_last, keep_every=keep_every)
    assert steps_of(root) == kept
    assert sorted([*gone, *kept]) == [2, 4, 6, 8, 10, 12]


def test_what_the_tracker_names_and_what_is_newer_stay(root: Path) -> None:
    make(root, 14, whole=False)
    assert remove_old(root, 6, keep_last=1, keep_every=None) == [2, 4]
    assert steps_of(root) == [6, 8, 10, 12, 14]


def test_a_partial_or_damaged_checkpoint_takes_the_place_of_no_whole_one(root: Path) -> None:
    make(root, 11, whole=False)
    (folder_of(root, 10) / "__0_0.distcp").unlink()
    remove_old(root, 12, keep_last=2, keep_every=11)
    assert steps_of(root) == [8, 12]


def test_links_and_checkpoints_of_the_older_format_stay(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = make(tmp_path_factory.mktemp("elsewhere"), 3)
    folder_of(root, 3).symlink_to(elsewhere)
    (folder_of(root, 5) / "mp_rank_00").mkdir(parents=True)
    remove_old(root, 12, keep_last=1, keep_every=None)
    assert steps_of(root) == [3, 5, 12]
    assert damages(elsewhere, checksums=True) == []


def test_a_folder_that_is_being_removed_is_no_checkpoint_any_more(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention.shutil, "rmtree", lambda *_, **__: None)  # a crash just before
    remove_old(root, 12, keep_last=1, keep_every=None)
    assert steps_of(root) == [12]
    assert len(list(root.glob("iter_*"))) == 1
    assert len(list(root.glob(f"{DELETED}*"))) == 5


def test_what_a_crash_has_left_of_a_removal_goes_with_the_next(root: Path) -> None:
    leftover = root / f"{DELETED}iter_0000002"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"")
    remove_old(root, 12, keep_last=1, keep_every=None)
    for thread in retention.threading.enumerate():
        if thread is not retention.threading.current_thread() and not thread.daemon:
            thread.join()
    assert sorted(path.name for path in root.iterdir()) == ["iter_0000012"]


# -- files ----------------------------------------------------------------------------------------------------


def test_a_file_takes_its_place_only_when_it_is_whole(tmp_path: Path) -> None:
    tracker = tmp_path / TRACKER
    tracker.write_text("2")

    def write(*, fails: bool) -> None:
        with replacing(tracker) as file:
            file.write("4")
            file.flush()
            assert tracker.read_text() == "2"
            if fails:
                raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write(fails=True)
    assert tracker.read_text() == "2"
    write(fails=False)
    assert tracker.read_text() == "4"
    assert [path.name for path in tmp_path.iterdir()] == [TRACKER]


def test_the_digest_that_a_writer_leaves_is_taken_once_and_made_where_there_is_none(tmp_path: Path) -> None:
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(b"content")
    assert take_digest(path) == sha256_of(path)
    leave_digest(path)
    path.write_bytes(b"changed afterwards")
    assert take_digest(path) != sha256_of(path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_manifest_of_a_later_format_is_not_taken_for_ours(tmp_path: Path) -> None:
    folder = make(tmp_path, 2)
    content = {"format_version": FORMAT_VERSION + 1, "files": {}}
    (folder / MANIFEST).write_text(json.dumps({"sha256": digest_of(content), **content}))
    assert damages(folder, checksums=True) == [
        f"{folder / MANIFEST} is of format {FORMAT_VERSION + 1}, this program reads {FORMAT_VERSION}"
    ]


def test_each_of_several_readers_reads_other_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 2)
    folder.mkdir()
    files = {f"__{rank}_0.distcp": {"bytes": 1, "sha256": "of something else"} for rank in range(5)}
    for name in files:
        (folder / name).write_bytes(b"x")
    content = {"format_version": FORMAT_VERSION, "files": files}
    (folder / MANIFEST).write_text(json.dumps({"sha256": digest_of(content), **content}))
    shares = [damages(folder, checksums=True, share=(number, 3)) for number in range(3)]
    assert [len(share) for share in shares] == [2, 2, 1]
    assert sorted(damage for share in shares for damage in share) == sorted(damages(folder, checksums=True))
    assert damages(folder, checksums=False) == []
