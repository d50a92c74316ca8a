"""What a training run leaves in its folder: manifests, what retention keeps, and what an asynchronous save saves."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from megatron_exo.checkpoints.inspection import compare, read_description
from megatron_exo.checkpoints.integrity import MANIFEST, damages, read_manifest
from megatron_exo.checkpoints.reading import TRACKER, steps_of
from megatron_exo.files import only_one_process
from megatron_exo.pretrain import main
from tests.checkpoints.runs import losses, pretrain
from tests.programs import MOCK_DATA, MODEL, RUN, one_line, run_program
from tests.ranks import run_on_ranks

BEFORE = "tracker-before"
"""Another name of the tracker file as it was after the second iteration."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of four iterations, saved after the second and the fourth."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    outcome = pretrain(folder)
    assert outcome.status == 0, outcome.err
    return folder


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, saved in the background, keeping one checkpoint; it stopped after two iterations and went on."""
    folder = tmp_path_factory.mktemp("asynchronous") / "run"
    for words in (["--exit-interval", "2"], []):
        outcome = pretrain(folder, "--async-save", "--keep-last", "1", *words)
        assert outcome.status == 0, outcome.err
        if not (folder / BEFORE).exists():
            os.link(folder / TRACKER, folder / BEFORE)
    assert f"loaded checkpoint 2 from {folder}" in outcome.out
    assert f"removed checkpoint 2 from {folder}" in outcome.out
    return folder


def test_a_second_start_of_a_run_that_is_under_way_is_refused(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    with only_one_process(folder, "…"):  # as the first rank does
        second = pretrain(folder, "--train-iters", "6", "--override-opt-param-scheduler")
    assert second.status == 1
    assert one_line(second.err) == (
        f"another process is writing {folder}; wait for it, or end that run, or pass another --save"
    )
    assert (folder / TRACKER).read_text() == "4"


# -- the manifest ---------------------------------------------------------------------------------------------


def test_a_checkpoint_says_what_it_is_of(run: Path) -> None:
    described = read_manifest(run / "iter_0000002")
    assert described is not None
    assert [described[name] for name in ("step", "consumed_samples", "consumed_tokens")] == [2, 16, 16 * 32]
    model = described["model"]
    assert (model["variant"], model["exo"]["mixing"]) == ("dynamic-e-exoformer", "dynamic")
    assert (model["num_layers"], model["hidden_size"], model["kv_channels"], model["num_query_groups"]) == (4, 32, 8, 4)
    assert (model["vocab_size"], model["padded_vocab_size"], model["tied_embeddings"]) == (64, 128, False)
    assert (model["rotary_base"], model["dtype"]) == (500_000, "float32")
    assert described["layout"]["tensor_model_parallel_size"] == 1
    assert described["data"]["mock"] is True
    assert described["tokenizer"]["type"] == "NullTokenizer"
    assert re.fullmatch(r"0\.19\.\d+", described["versions"]["megatron_core"])
    assert described["command"][described["command"].index("--train-iters") + 1] == "4"
    assert described["arguments"]["lr"] == 1e-3


def test_every_file_is_listed_with_its_size_and_checksum_and_nothing_else_is_left(run: Path) -> None:
    folder = run / "iter_0000004"
    described = read_manifest(folder)
    assert described is not None
    there = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}
    assert described["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in there.items()
    }
    assert set(there) == {"__0_0.distcp", ".metadata", "metadata.json"}
    assert damages(folder, checksums=True) == []


def test_without_a_manifest_a_checkpoint_says_the_same_of_its_model(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run / "iter_0000002", tmp_path / "iter_0000002"))
    before = read_description(folder)
    (folder / MANIFEST).unlink()
    after = read_description(folder)
    assert after.keys() < before.keys()
    assert after == {name: before[name] for name in after}


# -- saving over what is there --------------------------------------------------------------------------------


def test_a_save_over_another_checkpoint_leaves_nothing_of_it(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    (folder / "iter_0000004" / "__7_0.distcp").write_bytes(b"of a rank that is no longer")
    outcome = pretrain(folder, "--ckpt-step", "2")
    assert outcome.status == 0, outcome.err
    assert sorted(path.name for path in (folder / "iter_0000004").iterdir()) == [
        ".metadata", "__0_0.distcp", MANIFEST, "metadata.json",
    ]  # fmt: skip
    assert not compare(run / "iter_0000004", folder / "iter_0000004").tensors_differ()


# -- asynchronous saves, and what is kept -----------------------------------------------------------------------


def test_a_checkpoint_saved_in_the_background_and_resumed_from_equals_one_saved_in_the_foreground(
    run: Path, asynchronous: Path
) -> None:
    difference = compare(run / "iter_0000004", asynchronous / "iter_0000004")
    assert not difference.tensors_differ()
    assert difference.equal > 200
    # The sum of the losses, which no gradient depends on, is rounded as the batch happens to lie in memory.
    assert losses(asynchronous) == pytest.approx(losses(run), abs=2e-6)
    assert damages(asynchronous / "iter_0000004", checksums=True) == []


def test_the_background_holds_the_step_at_which_it_was_asked_for(asynchronous: Path) -> None:
    described = read_manifest(asynchronous / "iter_0000004")
    assert described is not None
    assert (described["step"], described["consumed_samples"]) == (4, 32)


def test_only_what_is_to_be_kept_is_left(asynchronous: Path) -> None:
    assert steps_of(asynchronous) == [4]
    assert (asynchronous / TRACKER).read_text() == "4"


def test_the_tracker_is_replaced_and_never_half_written(asynchronous: Path) -> None:
    assert (asynchronous / BEFORE).read_text() == "2"
    assert [path.name for path in asynchronous.glob(f".{TRACKER}*")] == []


def test_the_tracker_names_no_checkpoint_without_its_manifest(run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("iter_0000004")))
    (folder / TRACKER).write_text("2")
    (folder / "iter_0000004" / f".{MANIFEST}.new").mkdir(parents=True)  # so that the manifest cannot be written
    assert pretrain(folder).status == 1
    assert (folder / "iter_0000004" / "metadata.json").exists()
    assert not (folder / "iter_0000004" / MANIFEST).exists()
    assert (folder / TRACKER).read_text() == "2"


def test_a_disk_that_fills_up_in_the_background_costs_only_the_checkpoint_it_had_no_room_for(
    run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run / "iter_0000002", folder / "iter_0000002")
    (folder / TRACKER).write_text("2")
    failed = pretrain(folder, "--async-save", "--keep-last", "1", largest_file=500_000)
    assert failed.status == 1
    assert failed.err.splitlines()[-1] == (
        "error: rank 0: cannot write: File too large; the checkpoints before this one are whole, "
        "make room and start again with the same command"
    )
    assert (folder / TRACKER).read_text() == "2"
    assert damages(folder / "iter_0000002", checksums=True) == []
    assert damages(folder / "iter_0000004", checksums=False) != []


def test_a_folder_that_cannot_be_written_costs_only_the_checkpoint_it_was_for(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run / "iter_0000002", folder / "iter_0000002")
    (folder / TRACKER).write_text("2")
    (folder / "iter_0000004").symlink_to("/sys")  # where not even root may make a file
    failed = pretrain(folder)
    assert failed.status == 1
    assert re.match(r"rank 0: .*(Permission denied|Read-only file system)", one_line(failed.err))
    assert (folder / TRACKER).read_text() == "2"
    assert damages(folder / "iter_0000002", checksums=True) == []


def _save_twice(folder: Path) -> list[str]:
    """Ask for two saves in the background, of which the first waits; what was done, in order."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest

    done: list[str] = []
    queue = AsyncCallsQueue(persistent=True)
    for name in ("first", "second"):
        queue.schedule_async_request(AsyncRequest(_write_slowly, (folder / name,), [partial(done.append, name)]))
        done.append(f"{name} asked for, {len(list(folder.iterdir()))} written")
        (folder / name).with_suffix(".go").touch()
    queue.close()
    return done


def _write_slowly(path: Path) -> None:
    while not path.with_suffix(".go").exists():
        time.sleep(0.01)
    path.touch()


def test_one_save_in_the_background_waits_for_the_other(tmp_path: Path) -> None:
    (done,) = run_on_ranks(1, _save_twice, tmp_path)
    assert done == ["first asked for, 0 written", "first", "second asked for, 2 written", "second"]


def _refused(words: str) -> str:
    outcome = run_program(main, [*f"{MODEL} {MOCK_DATA} {RUN}".split(), *words.split()])
    assert outcome.status == 1
    return one_line(outcome.err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--keep-last 0", "--keep-last 0 would keep none; pass 1 or more, or leave it out to keep all"),
        ("--keep-every -2", "--keep-every -2 would keep none; pass 1 or more, or leave it out to keep all"),
        (
            "--keep-last 2 --save-retain-interval 4",
            "--keep-last and --save-retain-interval both say what to remove; leave one of them out",
        ),
        (
            "--keep-last 2 --ckpt-format torch",
            "--keep-last needs --ckpt-format torch_dist, not torch; leave one of them out",
        ),
        (
            "--async-save --async-strategy nvrx",
            "--async-strategy nvrx needs a CUDA device; leave it out, Megatron's own is used then",
        ),
    ],
)
def test_what_cannot_be_kept_or_saved_in_the_background_is_said_at_once(words: str, message: str) -> None:
    assert _refused(words) == message
