"""Datasets whose making is killed, and goes on: nothing is done twice, and the files are those of an unbroken run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_exo.data import index_format, unfinished
from megatron_exo.data import preprocess as module
from megatron_exo.data.index_format import token_dtype, write_index
from megatron_exo.data.preprocess import preprocess
from megatron_exo.data.readers import StreamError
from megatron_exo.data.tokenizers import TokenizerSpec
from megatron_exo.data.unfinished import UnfinishedDataset, UnfinishedError
from megatron_exo.data.validate import DatasetError, check_dataset
from megatron_exo.errors import UserError
from megatron_exo.files import only_one_process
from tests.ranks import forked

BATCH_BYTES = 6000  # so that the texts are a dozen batches, and each of them is saved

Place = tuple[Any, str, Callable[[int, tuple[Any, ...]], bool]]
PLACES: dict[str, Place] = {
    # what is called, and whether it is killed there, by the number of the call and the arguments
    "before anything is saved": (unfinished, "replacing", lambda call, _: call == 1),
    "before a batch is written": (UnfinishedDataset, "append", lambda call, _: call == 3),
    "with a batch on the disk of which the state knows nothing": (json, "dump", lambda call, _: call == 5),
    "before the index": (unfinished, "write_index", lambda *_: True),
    "before the check": (unfinished, "check_dataset", lambda *_: True),
    "before the first file gets its name": (os, "replace", lambda _, args: str(args[1]).endswith("out.bin")),
    "before the index gets its name": (os, "replace", lambda _, args: str(args[1]).endswith("out.idx")),
    "before the folder goes": (Path, "unlink", lambda _, args: args[0].name == "state.json"),
}


def _die(where: str, pids: Path, *args: Any, **options: Any) -> None:
    """``preprocess``, killed at a place that it comes to, after writing down which processes it has started."""
    owner, attribute, now = PLACES[where]
    original, calls = getattr(owner, attribute), 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if now(calls, args):
            pids.write_text(json.dumps([child.pid for child in psutil.Process().children(recursive=True)]))
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(owner, attribute, counted)
    module._BATCH_BYTES = BATCH_BYTES  # type: ignore[misc]
    unfinished._SAVE_INTERVAL_S = 0.0
    preprocess(*args, **options)


def kill(where: str, pids: Path, *args: Any, **options: Any) -> list[int]:
    """The processes that were left when ``preprocess`` was killed."""
    process = forked().Process(target=_die, args=(where, pids, *args), kwargs=options)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return json.loads(pids.read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, jsonl: Path, sentencepiece_spec: TokenizerSpec) -> Path:
    """What an unbroken run makes of the texts."""
    prefix = tmp_path_factory.mktemp("whole") / "out"
    preprocess([str(jsonl)], str(prefix), sentencepiece_spec)
    return prefix


def assert_same(prefix: Path, whole: Path) -> None:
    for suffix in (".bin", ".idx", ".json"):
        assert prefix.with_suffix(suffix).read_bytes() == whole.with_suffix(suffix).read_bytes()
    assert not Path(f"{prefix}.partial").exists()


@pytest.mark.parametrize("where", PLACES)
def test_the_same_command_goes_on_after_a_kill_to_the_same_files(
    tmp_path: Path,
    jsonl: Path,
    sentencepiece_spec: TokenizerSpec,
    whole: Path,
    where: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    prefix = tmp_path / "out"
    kill(where, tmp_path / "pids", [str(jsonl)], str(prefix), sentencepiece_spec)
    if where != "before the folder goes":
        with pytest.raises(DatasetError, match=r"it is unfinished \(.*out\.partial\); repeat the command"):
            check_dataset(prefix)
    capfd.readouterr()
    result = preprocess([str(jsonl)], str(prefix), sentencepiece_spec)
    assert result.sidecar.documents == 12
    assert_same(prefix, whole)
    went_on = "going on after" in capfd.readouterr().err
    assert went_on == (where != "before anything is saved")


def test_an_interruption_keeps_what_is_done_and_not_what_is_half_done(
    tmp_path: Path,
    jsonl: Path,
    sentencepiece_spec: TokenizerSpec,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    prefix, mark = tmp_path / "out", UnfinishedDataset.mark

    def interrupted(self: UnfinishedDataset, position: Any) -> None:
        if self.documents >= 6:  # written, but nothing says so
            raise KeyboardInterrupt
        mark(self, position)

    monkeypatch.setattr(module, "_BATCH_DOCUMENTS", 2)
    with monkeypatch.context() as patch:
        patch.setattr(UnfinishedDataset, "mark", interrupted)
        with pytest.raises(KeyboardInterrupt):
            preprocess([str(jsonl)], str(prefix), sentencepiece_spec)
    assert f"what is done is kept in {prefix}.partial; the same command goes on with it" in capfd.readouterr().err
    preprocess([str(jsonl)], str(prefix), sentencepiece_spec)
    assert "going on after 4 documents" in capfd.readouterr().err
    assert_same(prefix, whole)


def test_killed_workers_end_and_the_rest_is_done_with_another_number_of_them(
    tmp_path: Path, jsonl: Path, sentencepiece_spec: TokenizerSpec, whole: Path
) -> None:
    prefix, where = tmp_path / "out", "before a batch is written"
    workers = kill(where, tmp_path / "pids", [str(jsonl)], str(prefix), sentencepiece_spec, workers=2)
    assert len(workers) >= 2
    patience = time.monotonic() + 30
    while any(map(psutil.pid_exists, workers)) and time.monotonic() < patience:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, workers))
    preprocess([str(jsonl)], str(prefix), sentencepiece_spec)
    assert_same(prefix, whole)


def test_empty_documents_before_the_kill_are_still_counted_and_shown(
    tmp_path: Path, texts: list[str], sentencepiece_spec: TokenizerSpec
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *texts, " "]))
    kill("before a batch is written", tmp_path / "pids", [str(source)], str(tmp_path / "out"), sentencepiece_spec)
    result = preprocess([str(source)], str(tmp_path / "out"), sentencepiece_spec)
    assert result.empty == [f"document 0 ({source}:1)", f"document 13 ({source}:14)"]
    assert (result.sidecar.documents, result.sidecar.empty_documents) == (12, 2)


def test_a_stream_that_breaks_goes_on_where_it_broke(
    tmp_path: Path, texts: list[str], sentencepiece_spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    folder = tmp_path / "hub"
    folder.mkdir()
    files = [folder / f"train-{number}.parquet" for number in range(2)]
    for number, file in enumerate(files):
        parquet.write_table(pyarrow.table({"text": texts[6 * number : 6 * number + 6]}), file, row_group_size=2)
    arguments = ([f"hf:{folder}"], str(tmp_path / "out"), sentencepiece_spec)
    preprocess(arguments[0], str(tmp_path / "whole"), sentencepiece_spec)

    monkeypatch.setattr(module, "_BATCH_DOCUMENTS", 4)
    good, times = files[1].read_bytes(), (files[1].stat().st_atime_ns, files[1].stat().st_mtime_ns)
    files[1].write_bytes(good[: len(good) // 2])
    os.utime(files[1], ns=times)  # it is still the same dataset
    for _ in range(2):
        with pytest.raises(StreamError, match=r"cannot stream it .* after row 6"):
            preprocess(*arguments)
        assert json.loads((tmp_path / "out.partial/state.json").read_text())["documents"] == 4
    files[1].write_bytes(good)
    os.utime(files[1], ns=times)
    preprocess(*arguments)
    assert_same(tmp_path / "out", tmp_path / "whole")


@pytest.fixture
def killed(tmp_path: Path, jsonl: Path, sentencepiece_spec: TokenizerSpec) -> tuple[list[str], str, TokenizerSpec]:
    """Arguments of a call that was killed halfway; the input is a copy, which a test may change."""
    source = tmp_path / "copy.jsonl"
    shutil.copyfile(jsonl, source)
    arguments = ([str(source)], str(tmp_path / "out"), sentencepiece_spec)
    kill("before a batch is written", tmp_path / "pids", *arguments)
    return arguments


def test_unfinished_work_of_another_command_is_neither_used_nor_lost(
    killed: tuple[list[str], str, TokenizerSpec], gpt2_spec: TokenizerSpec, whole: Path
) -> None:
    (source,), prefix, spec = killed
    before = {path.name: path.read_bytes() for path in Path(f"{prefix}.partial").iterdir()}
    for change, named in (
        (lambda: preprocess([source], prefix, spec, json_key="body"), "json_key"),
        (lambda: preprocess([source], prefix, spec, append_eod=False), "append_eod"),
        (lambda: preprocess([source, source], prefix, spec), "inputs"),
        (lambda: preprocess([source], prefix, gpt2_spec), "tokenizer_type, .*tokenizer_fingerprint"),
        (lambda: (os.utime(source), preprocess([source], prefix, spec)), "inputs"),
    ):
        with pytest.raises(UnfinishedError, match=rf"of another command \(it differs in: {named}\); repeat that"):
            change()
    assert {path.name: path.read_bytes() for path in Path(f"{prefix}.partial").iterdir()} == before
    preprocess([source], prefix, spec, overwrite=True)
    assert Path(f"{prefix}.bin").read_bytes() == whole.with_suffix(".bin").read_bytes()


def _cut_tokens(folder: Path) -> None:
    (folder / "data.bin").write_bytes(b"")


def _damage_state(folder: Path) -> None:
    (folder / "state.json").write_text('{"documents": -1}')


def _lose_state(folder: Path) -> None:
    (folder / "state.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut_tokens, r"data\.bin is shorter than state\.json says; remove .*out\.partial to begin anew"),
        (_damage_state, r"state\.json is damaged; remove .*out\.partial to begin anew"),
        (_lose_state, r"out\.partial is no unfinished dataset of this program; remove it, or write elsewhere"),
    ],
)
def test_a_damaged_folder_is_refused(
    killed: tuple[list[str], str, TokenizerSpec], damage: Callable[[Path], None], message: str
) -> None:
    folder = Path(f"{killed[1]}.partial")
    damage(folder)
    with pytest.raises(UnfinishedError, match=message):
        preprocess(*killed)
    assert folder.is_dir()


def test_two_processes_do_not_write_one_dataset(killed: tuple[list[str], str, TokenizerSpec]) -> None:
    with (
        only_one_process(Path(f"{killed[1]}.partial"), "stop"),
        pytest.raises(UserError, match=r"another process is writing .*out\.partial; wait for it, or choose another"),
    ):
        preprocess(*killed)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("lengths", [[3], [3, 1, 4, 1, 5, 9, 2]])
def test_the_index_is_the_one_that_megatron_writes(
    tmp_path: Path, dtype: type, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    monkeypatch.setattr(index_format, "_BLOCK", 3)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for length in lengths:
        builder.add_document(np.arange(length), [length])
    builder.finalize(str(tmp_path / "theirs.idx"))
    write_index(tmp_path / "ours.idx", np.dtype(dtype), np.array(lengths, np.int32))
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


def test_tokens_are_stored_in_the_type_that_megatron_chooses() -> None:
    from megatron.core.datasets.indexed_dataset import DType

    for size in (8192, 50257, 57601, 65499, 65500, 128256):
        assert token_dtype(size) == DType.optimal_dtype(size)
