"""Checkpoints that are damaged, cut short or dangerous: one line, and nothing is lost."""

from __future__ import annotations

import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_exo.checkpoints.integrity import MANIFEST
from megatron_exo.checkpoints.reading import TRACKER, CheckpointError, read_index
from megatron_exo.resume import check_load, folder_to_load
from tests.resume.runs import error_of, exo_of, pretrain, remove


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, size)


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def overwrite_shared_state(folder: Path) -> None:
    index = read_index(folder)
    (part,) = (part for key, part in index.storage_data.items() if key.fqn.startswith("common_state"))
    with (folder / part.relative_path).open("r+b") as file:
        file.seek(part.offset)
        file.write(bytes(part.length))


def flip_a_byte(name: str) -> Callable[[Path], object]:
    def flip(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek((folder / name).stat().st_size // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))

    return flip


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (cut("__0_0.distcp", 5000), r"no complete checkpoint: __0_0\.distcp is cut off: 5000 bytes of \d+; copy it again"),
    (
        remove("__0_0.distcp"),
        r"no complete checkpoint: __0_0\.distcp is missing; copy it again, or start anew from anoth",
    ),
    (remove(".metadata"), r"no complete checkpoint: it has no index; copy it again"),
    (remove("metadata.json"), r"no complete checkpoint: it has no index"),
    (cut(".metadata", 1000), r"\.metadata is damaged: \w+: .*; copy it again"),
    (write(".metadata", b""), r"\.metadata is damaged: EOFError"),
    (write(".metadata", pickle.dumps({"a": 1})), r"\.metadata is damaged: UnpicklingError: it holds a dict"),
    (overwrite_shared_state, r"common_state.* is damaged: .*; copy it again"),
    (
        write(f"../{TRACKER}", b"two"),
        r"does not name an iteration but 'two'; write the number of a folder iter_N there, or go on from the newest "
        r"whole one with --ckpt-step 2$",
    ),
    (write(f"../{TRACKER}", b"6"), r"iter_0000006 is missing \(there: iter_0000002\)"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[message[:40] for _, message in DAMAGES])
def test_a_damaged_checkpoint_without_a_manifest_is_refused_with_what_is_wrong(
    args: Namespace, damage: Callable[[Path], object], message: str
) -> None:
    folder = Path(args.load) / "iter_0000002"
    remove(MANIFEST)(folder)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as refusal:
        check_load(args, exo_of(args))
    assert "\n" not in str(refusal.value)


DAMAGES_BY_MANIFEST: list[tuple[Callable[[Path], object], str]] = [
    (flip_a_byte("__0_0.distcp"), r"__0_0\.distcp is damaged: its SHA-256 is not the one it was saved with"),
    (flip_a_byte(".metadata"), r"\.metadata is damaged: its SHA-256"),
    (flip_a_byte("metadata.json"), r"metadata\.json is damaged: its SHA-256"),
    (flip_a_byte(MANIFEST), rf"{MANIFEST} is damaged: "),
    (write(MANIFEST, b"{}"), rf"{MANIFEST} is damaged: KeyError: 'sha256'"),
    (cut(MANIFEST, 1000), rf"{MANIFEST} is damaged: JSONDecodeError: "),
    (cut("__0_0.distcp", 5000), r"__0_0\.distcp is cut off: 5000 bytes of \d+"),
    (cut("__0_0.distcp", 5_000_000), r"__0_0\.distcp is too long: 5000000 bytes instead of \d+"),
    (remove("__0_0.distcp"), r"__0_0\.distcp is missing"),
    (remove(".metadata"), r"\.metadata is missing"),
]


@pytest.mark.parametrize(
    ("damage", "message"), DAMAGES_BY_MANIFEST, ids=[message[:40] for _, message in DAMAGES_BY_MANIFEST]
)
def test_whatever_happens_to_a_file_is_seen_at_load_and_the_checkpoint_before_is_offered(
    args: Namespace, damage: Callable[[Path], object], message: str
) -> None:
    root = Path(args.load)
    shutil.copytree(root / "iter_0000002", root / "iter_0000004")
    (root / TRACKER).write_text("4")
    check_load(args, exo_of(args))
    damage(root / "iter_0000004")
    offer = "copy it again, or go on from the newest whole one before it with --ckpt-step 2$"
    with pytest.raises(CheckpointError, match=f"iter_0000004.*{message}.*; {offer}") as refusal:
        check_load(args, exo_of(args))
    assert "\n" not in str(refusal.value)
    args.ckpt_step = 2
    check_load(args, exo_of(args))


def test_a_damaged_checkpoint_is_not_offered_in_the_place_of_another(args: Namespace) -> None:
    root = Path(args.load)
    for step in (4, 6, 8):
        shutil.copytree(root / "iter_0000002", root / f"iter_{step:07d}")
    (root / TRACKER).write_text("8")
    remove(MANIFEST)(root / "iter_0000008")
    remove(".metadata")(root / "iter_0000008")
    flip_a_byte("__0_0.distcp")(root / "iter_0000006")
    with pytest.raises(CheckpointError, match=r"it has no index; copy it again, or .* with --ckpt-step 4$"):
        check_load(args, exo_of(args))


def test_a_folder_that_holds_only_a_partial_checkpoint_is_a_first_start(args: Namespace) -> None:
    folder = Path(args.load) / "iter_0000002"
    for name in (f"../{TRACKER}", MANIFEST, "metadata.json"):
        remove(name)(folder)
    assert folder_to_load(args) is None


@pytest.mark.parametrize("has_manifest", [True, False], ids=["with a manifest", "without"])
def test_a_first_checkpoint_cut_short_before_its_tracker_is_gone_on_from(
    args: Namespace, capsys: pytest.CaptureFixture[str], has_manifest: bool
) -> None:
    root = Path(args.load)
    shutil.copytree(root / "iter_0000002", root / "iter_0000004")
    remove("metadata.json")(root / "iter_0000004")
    remove(f"../{TRACKER}")(root / "iter_0000002")
    if not has_manifest:
        remove(MANIFEST)(root / "iter_0000002")
    args.pretrained_checkpoint = str(root)  # what Megatron would read without a tracker
    check_load(args, exo_of(args))
    assert (args.ckpt_step, args.pretrained_checkpoint) == (2, None)
    assert f"{root} has no {TRACKER}: going on from its newest whole checkpoint, 2\n" in capsys.readouterr().out


def test_a_run_killed_between_its_first_checkpoint_and_the_tracker_goes_on_by_itself(run: Path) -> None:
    (run / TRACKER).unlink()
    again = pretrain(run)
    assert again.status == 0, again.err
    assert f"loaded checkpoint 2 from {run}" in again.out
    assert (run / TRACKER).read_text() == "4"


def test_weights_to_begin_with_are_not_guessed(args: Namespace) -> None:
    args.pretrained_checkpoint, args.load = args.load, None
    remove(f"../{TRACKER}")(Path(args.pretrained_checkpoint) / "iter_0000002")
    with pytest.raises(CheckpointError, match=r"holds checkpoints but no .*; pass --ckpt-step 2 for the newest whole"):
        check_load(args, exo_of(args))


@pytest.mark.slow
def test_a_load_at_which_megatron_gives_up_is_no_success(tmp_path: Path) -> None:
    """A checkpoint in its older format that lacks what it looks for first."""
    folder = tmp_path / "iter_0000003" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"arguments": 1}, folder / "model_optim_rng.pt")
    (tmp_path / TRACKER).write_text("3")
    assert error_of(pretrain(tmp_path)).startswith("rank 0: Megatron has given up, which it does where it cannot load")


def test_a_checkpoint_without_a_manifest_loads(args: Namespace) -> None:
    remove(MANIFEST)(Path(args.load) / "iter_0000002")
    check_load(args, exo_of(args))


def test_files_are_read_by_one_process_of_each_machine_and_not_at_all_if_told_so(
    args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_byte("__0_0.distcp")(Path(args.load) / "iter_0000002")  # the second of three files

    def is_seen_by(rank: int, world_size: int, ranks_here: int) -> bool:
        names = {"RANK": rank, "LOCAL_RANK": rank % ranks_here, "WORLD_SIZE": world_size}
        for name, value in (names | {"LOCAL_WORLD_SIZE": ranks_here}).items():
            monkeypatch.setenv(name, str(value))
        try:
            check_load(args, exo_of(args))
        except CheckpointError:
            return True
        return False

    assert [is_seen_by(rank, 4, 4) for rank in range(4)] == [True, False, False, False]
    assert [is_seen_by(rank, 6, 2) for rank in range(6)] == [False, False, True, False, False, False]
    args.verify_checkpoint = False
    assert not any(is_seen_by(rank, 6, 2) for rank in range(6))


class Intruder:
    def __init__(self, traces: Path) -> None:
        self.traces = traces

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.traces,)


@pytest.mark.parametrize("call", ["plain", "hidden behind a module of checkpoints"])
def test_an_index_that_would_run_code_is_not_run(args: Namespace, tmp_path: Path, call: str) -> None:
    traces = tmp_path / "traces"
    content = pickle.dumps(Intruder(traces))
    if call != "plain":  # the same function, by a path that begins as allowed ones do
        program = b"ctorch.distributed.checkpoint.filesystem\nos.mkdir\n(V%b\ntR."
        content = b"\x80\x04" + program.replace(b"%b", str(traces).encode())
    remove(MANIFEST)(Path(args.load) / "iter_0000002")
    (Path(args.load) / "iter_0000002" / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged: UnpicklingError: it names .*does not need"):
        check_load(args, exo_of(args))
    assert not traces.exists()
    assert pickle.loads(content) is None  # the attack is a real one
    assert traces.exists()
