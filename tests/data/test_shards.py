"""Public shards of GPT-2 tokens become a dataset with every token once, or are refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_exo.data import shard_conversion as module
from megatron_exo.data import unfinished
from megatron_exo.data.shard_conversion import convert_shards
from megatron_exo.data.shard_format import ShardError
from megatron_exo.data.sidecar import Sidecar
from megatron_exo.data.tokenizers import TokenizerError, TokenizerSpec
from megatron_exo.data.validate import DatasetError, check_dataset, check_sidecar
from tests.data.test_data_tools import load
from tests.ranks import forked

EOT = 50256

GOLDEN = (
    b"\x88\xd8\x34\x01"  # 20240520
    b"\x01\x00\x00\x00"  # version 1
    b"\x07\x00\x00\x00"  # 7 tokens
    + bytes(1012)
    + b"\x50\xc4"  # 50256
    + b"\x0a\x00\x0b\x00"  # 10, 11
    + b"\x50\xc4"
    + b"\x0c\x00"  # 12
    + b"\x50\xc4"
    + b"\x00\x01"  # 256
)
"""A shard byte by byte: [50256, 10, 11, 50256, 12, 50256, 256]."""


def write_shard(path: Path, tokens: Sequence[int], **header: int) -> Path:
    fields = {"magic": 20240520, "version": 1, "count": len(tokens)} | header
    path.write_bytes(struct.pack("<iii1012x", *fields.values()) + np.array(tokens, "<u2").tobytes())
    return path


def documents_of(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    return [dataset[index].tolist() for index in range(len(dataset))]


def convert(tmp_path: Path, *streams: Sequence[int], **options: Any) -> list[list[int]]:
    shards = [write_shard(tmp_path / f"s{number}.bin", tokens) for number, tokens in enumerate(streams)]
    convert_shards(list(map(str, shards)), str(tmp_path / "out"), **options)
    return documents_of(tmp_path / "out")


def test_a_shard_becomes_documents_that_end_with_the_separator(tmp_path: Path) -> None:
    (tmp_path / "golden.bin").write_bytes(GOLDEN)
    sidecar = convert_shards([str(tmp_path / "golden.bin")], str(tmp_path / "out"))
    assert documents_of(tmp_path / "out") == [[EOT, 10, 11, EOT], [12, EOT], [256]]
    assert (tmp_path / "out.bin").read_bytes() == GOLDEN[1024:]
    assert sidecar == Sidecar.load(str(tmp_path / "out.json"))
    assert (sidecar.documents, sidecar.tokens, sidecar.vocab_size, sidecar.eod) == (3, 7, 50257, EOT)
    assert sidecar.inputs == ["golden.bin"]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("block", [1, 2, 3, 1000])
def test_documents_go_on_over_the_ends_of_shards_and_blocks(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    streams = [EOT, 1, 2, 3], [4], [5, EOT, EOT, 6], [EOT, 7, 8], [EOT]
    documents = convert(tmp_path, *streams)
    assert documents == [[EOT, 1, 2, 3, 4, 5, EOT], [EOT], [6, EOT], [7, 8, EOT]]


def test_a_stream_may_begin_inside_a_document_and_hold_no_separator(tmp_path: Path) -> None:
    assert convert(tmp_path, [1, 2, EOT, 3]) == [[1, 2, EOT], [3]]
    assert convert(tmp_path, [1, 2], [3], overwrite=True) == [[1, 2, 3]]
    assert convert(tmp_path, [EOT], overwrite=True) == [[EOT]]


def test_random_streams_keep_every_token_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 64)
    generator = np.random.default_rng(1)
    for _ in range(20):
        stream = generator.integers(0, 50257, 500)
        stream[generator.random(500) < generator.choice([0.0, 0.05, 0.6])] = EOT
        cuts = np.sort(generator.choice(np.arange(1, 500), 3, replace=False))
        documents = convert(tmp_path, *map(np.ndarray.tolist, np.split(stream, cuts)), overwrite=True)
        assert [token for document in documents for token in document] == stream.tolist()
        assert all(EOT not in document[:-1] for document in documents[1:])
        assert all(document[-1] == EOT for document in documents[:-1])


REFUSALS = {
    "another magic": ({"magic": 20240801}, "not a shard of GPT-2 tokens: it begins with 20240801 instead of 20240520"),
    "another version": ({"version": 2}, "version 2 of the layout of shards is unknown; this program reads 1"),
    "cut off": ({"count": 4}, "the file is cut off: it has 1030 bytes, its header counts 4 tokens, which take 1032"),
    "too long": ({"count": 2}, "the file is too long: it has 1030 bytes, its header counts 2 tokens, .*; download"),
    "a huge count": ({"count": 2**31 - 1}, "the file is cut off"),
    "a negative count": ({"count": -1}, "the header counts -1 tokens"),
    "nothing": ({"count": 0}, "the header counts 0 tokens"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_shard_that_is_not_whole_is_refused_before_anything_is_written(tmp_path: Path, case: str) -> None:
    header, message = REFUSALS[case]
    good, bad = write_shard(tmp_path / "good.bin", [1]), write_shard(tmp_path / "bad.bin", [1, 2, 3], **header)
    with pytest.raises(ShardError, match=rf"bad\.bin: {message}") as caught:
        convert_shards([str(good), str(bad)], str(tmp_path / "out"))
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.bin", "good.bin"]


def test_what_is_no_list_of_shards_is_refused(tmp_path: Path) -> None:
    shard = str(write_shard(tmp_path / "a.bin", [1]))
    (tmp_path / "short.bin").write_bytes(GOLDEN[:1000])
    for shards, message in (
        ([], "no shards are given"),
        ([shard, f"{tmp_path}/./a.bin"], "a.bin is given twice; name every shard once"),
        ([str(tmp_path / "nowhere.bin")], "nowhere.bin: no such file"),
        ([str(tmp_path)], "no such file"),
        ([str(tmp_path / "short.bin")], "it has 1000 bytes, the header alone takes 1024"),
    ):
        with pytest.raises(ShardError, match=message):
            convert_shards(shards, str(tmp_path / "out"))


def test_a_token_that_gpt2_does_not_have_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK", 2)
    with pytest.raises(ShardError, match=r"s1\.bin: token 57600 at position 3 is outside GPT-2's vocabulary of 50257"):
        convert(tmp_path, [1, 2, 3, 4, 5], [6, 7, 8, 57600])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s0.bin", "s1.bin"]


def test_a_run_is_held_to_the_vocabulary_and_to_a_tokenizer_that_was_recorded(
    tmp_path: Path, gpt2_spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(tmp_path, [0, 1, 2, 0])
    assert check_sidecar(tmp_path / "out", "GPT2BPETokenizer", gpt2_spec.model, 50257)  # nothing to compare it with
    with pytest.raises(DatasetError, match=r"tokenised with GPT2BPETokenizer \(50257 tokens\), the run's .* has 400"):
        check_sidecar(tmp_path / "out", "GPT2BPETokenizer", gpt2_spec.model, 400)
    with pytest.raises(TokenizerError, match="has 400 tokens and the separator 0; shards have those of GPT-2, 50257"):
        convert(tmp_path, [0, 1, 2, 0], tokenizer_spec=gpt2_spec, overwrite=True)
    monkeypatch.setattr(module, "VOCAB_SIZE", 400)
    monkeypatch.setattr(module, "SEPARATOR", 0)
    assert convert(tmp_path, [0, 1, 2, 0], tokenizer_spec=gpt2_spec, overwrite=True) == [[0, 1, 2, 0]]
    sidecar = check_sidecar(tmp_path / "out", gpt2_spec.type, gpt2_spec.model, 400)
    assert sidecar is not None
    assert sidecar.tokenizer_sha256 == gpt2_spec.sha256()


def _convert_and_die(shards: list[str], prefix: str, at: int) -> None:
    original, calls = json.dump, 0

    def counted(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*args, **options)

    json.dump = counted
    module._BLOCK, unfinished._SAVE_INTERVAL_S = 16, 0.0  # type: ignore[misc]
    convert_shards(shards, prefix)


def test_a_killed_conversion_goes_on_to_the_same_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stream = np.random.default_rng(2).choice([EOT, *range(9)], 100)
    shards = [str(write_shard(tmp_path / f"s{number}.bin", part)) for number, part in enumerate(np.split(stream, 2))]
    convert_shards(shards, str(tmp_path / "whole"))
    for at, tokens in ((4, 32), (7, 66)):
        process = forked().Process(target=_convert_and_die, args=(shards, str(tmp_path / "out"), at))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        capfd.readouterr()
        state = json.loads((tmp_path / "out.partial/state.json").read_text())
        assert state["tokens"] == tokens
        convert_shards(shards, str(tmp_path / "out"))
        assert f"going on after {state['documents']} documents" in capfd.readouterr().err
        for suffix in (".bin", ".idx", ".json"):
            assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
            (tmp_path / f"out{suffix}").unlink()


def test_a_shard_in_the_place_of_a_dataset_is_known_for_one(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "train_000001.bin", [EOT, 1])
    for prefix in (shard, shard.with_suffix("")):
        message = f"{shard} is a shard of tokens without an index; make a dataset .*convert_shards.py --input {shard} "
        with pytest.raises(DatasetError, match=message):
            check_dataset(prefix)
    convert_shards([str(shard)], str(tmp_path / "out"))
    shutil.copyfile(tmp_path / "out.idx", tmp_path / "train_000001.idx")
    with pytest.raises(DatasetError, match="the file is too long"):  # the header, taken for tokens
        check_dataset(shard.with_suffix(""))


def test_the_tool_says_what_it_has_made_and_what_it_has_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = [str(write_shard(tmp_path / f"s{n}.bin", [EOT, 1, 2])) for n in range(2)]
    tool, prefix = load("convert_shards").main, str(tmp_path / "out")
    tool(["--input", *shards, "--output-prefix", prefix])
    said = capsys.readouterr()
    assert f"{prefix}: 2 documents, 6 tokens of 2 shards; train with --data-path {prefix}\n" in said.out
    assert "no tokenizer was given to record" in said.err
    load("preprocess_data").main(["--check", prefix])
    assert re.search(r"documents without a final separator +1\n", capsys.readouterr().out)
    with pytest.raises(SystemExit, match=r"^convert_shards: .*exist\(s\) already"):
        tool(["--input", *shards, "--output-prefix", prefix])
    with pytest.raises(SystemExit):
        tool(["--input", *shards, "--output-prefix", prefix, "--tokenizer-type", "GPT2BPETokenizer"])
    assert "pass both --tokenizer-type and --tokenizer-model" in capsys.readouterr().err
