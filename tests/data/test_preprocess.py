from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_exo.data import preprocess as module
from megatron_exo.data import unfinished
from megatron_exo.data.preprocess import PreprocessError, preprocess
from megatron_exo.data.readers import Document, InputError, Position
from megatron_exo.data.sidecar import Sidecar
from megatron_exo.data.tokenizers import Tokenizer, TokenizerError, TokenizerSpec
from megatron_exo.data.unfinished import UnfinishedError

BATCH = module._Batch([Document("Some text.", "here")], Position())


def write_json_lines(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def documents_of(prefix: Path) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [dataset[index].tolist() for index in range(len(dataset))]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt"])
def test_megatron_reads_back_every_format(
    tmp_path: Path, texts: list[str], sentencepiece_spec: TokenizerSpec, suffix: str
) -> None:
    source = tmp_path / f"in{suffix}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if suffix == ".txt":
        source = tmp_path / "texts"
        source.mkdir()
        for number, text in enumerate(texts):
            (source / f"{number:02}.txt").write_text(text, encoding="utf-8")
    elif suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": texts}), source)
    elif suffix == ".jsonl.zst":
        source.write_bytes(pytest.importorskip("zstandard").compress(lines))
    else:
        source.write_bytes(gzip.compress(lines) if suffix == ".jsonl.gz" else lines)
    preprocess([str(source)], str(tmp_path / "out"), sentencepiece_spec)
    encoded = sentencepiece_spec.load().encode_batch(texts)
    assert documents_of(tmp_path / "out") == [[*ids, 2] for ids in encoded]


@pytest.mark.parametrize("fixture", ["gpt2_spec", "hugging_face_spec"])
def test_byte_level_tokenizers_end_documents_with_their_own_separator(
    tmp_path: Path, jsonl: Path, texts: list[str], fixture: str, request: pytest.FixtureRequest
) -> None:
    spec = request.getfixturevalue(fixture)
    preprocess([str(jsonl)], str(tmp_path / "out"), spec)
    assert documents_of(tmp_path / "out") == [[*ids, 0] for ids in spec.load().encode_batch(texts)]


def test_the_result_does_not_depend_on_the_number_of_workers(
    tmp_path: Path, jsonl: Path, sentencepiece_spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 4096)  # so that there are more batches than workers
    for workers in (1, 3):
        preprocess([str(jsonl)], str(tmp_path / f"out{workers}"), sentencepiece_spec, workers=workers)
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"out1{suffix}").read_bytes() == (tmp_path / f"out3{suffix}").read_bytes()


def test_reading_stays_a_bounded_distance_ahead_of_writing(
    sentencepiece_spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    def endless() -> Iterator[module._Batch]:
        nonlocal read
        while True:
            read += 1
            yield BATCH

    results = module._ordered_map(_encode_nothing, endless(), sentencepiece_spec.load(), sentencepiece_spec, workers=2)
    for consumed in range(1, 20):
        next(results)
        assert read < consumed + 2 * module._TASKS_PER_WORKER
    results.close()


def _encode_nothing(batch: module._Batch, tokenizer: Tokenizer) -> module._Encoded:
    return module._Encoded(np.zeros(0, np.uint16), [], [], 0, batch.position)


def _die(batch: module._Batch, tokenizer: Tokenizer) -> module._Encoded:
    os._exit(9)


def test_the_death_of_a_worker_is_an_error_not_a_hang(sentencepiece_spec: TokenizerSpec) -> None:
    batches = iter([BATCH] * 3)
    with pytest.raises(PreprocessError, match="a worker process died"):
        list(module._ordered_map(_die, batches, sentencepiece_spec.load(), sentencepiece_spec, workers=2))


def test_the_description_records_tokenizer_and_counts(
    tmp_path: Path, jsonl: Path, texts: list[str], sentencepiece_spec: TokenizerSpec
) -> None:
    preprocess([str(jsonl)], str(tmp_path / "out"), sentencepiece_spec)
    sidecar = Sidecar.load(str(tmp_path / "out.json"))
    assert sidecar.tokenizer_type == "SentencePieceTokenizer"
    assert sidecar.tokenizer_sha256 == sentencepiece_spec.sha256()
    assert (sidecar.vocab_size, sidecar.eod, sidecar.dtype) == (500, 2, "uint16")
    assert sidecar.documents == len(texts)
    assert sidecar.tokens * 2 == (tmp_path / "out.bin").stat().st_size
    assert sidecar.inputs == ["texts.jsonl"]
    assert str(tmp_path) not in (tmp_path / "out.json").read_text()


def test_empty_documents_are_left_out_and_reported_by_number_and_source(
    tmp_path: Path, sentencepiece_spec: TokenizerSpec
) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", ["One.", "", "Two.", " \n\t"])
    result = preprocess([source], str(tmp_path / "out"), sentencepiece_spec)
    assert result.empty == [f"document 1 ({source}:2)", f"document 3 ({source}:4)"]
    assert (result.sidecar.documents, result.sidecar.empty_documents) == (2, 2)
    assert len(documents_of(tmp_path / "out")) == 2


def test_an_empty_document_can_be_an_error(tmp_path: Path, sentencepiece_spec: TokenizerSpec) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", ["One.", ""])
    with pytest.raises(PreprocessError, match=r"document 1 \(.*in\.jsonl:2\) is empty"):
        preprocess([source], str(tmp_path / "out"), sentencepiece_spec, skip_empty=False)
    assert names(tmp_path) == ["in.jsonl"]


def test_separators_can_be_left_off(tmp_path: Path, jsonl: Path, texts: list[str], gpt2_spec: TokenizerSpec) -> None:
    preprocess([str(jsonl)], str(tmp_path / "out"), gpt2_spec, append_eod=False)
    assert documents_of(tmp_path / "out") == gpt2_spec.load().encode_batch(texts)


def test_a_tokenizer_without_a_separator_is_refused_unless_none_is_wanted(
    tmp_path: Path, jsonl: Path, hugging_face_spec: TokenizerSpec
) -> None:
    bare = tmp_path / "bare.json"
    bare.write_bytes((Path(hugging_face_spec.model) / "tokenizer.json").read_bytes())
    spec = TokenizerSpec("HuggingFaceTokenizer", str(bare))
    with pytest.raises(TokenizerError, match="names no end-of-sequence token"):
        preprocess([str(jsonl)], str(tmp_path / "out"), spec)
    assert preprocess([str(jsonl)], str(tmp_path / "out"), spec, append_eod=False).sidecar.eod is None


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failure_midway_leaves_nothing_behind(
    tmp_path: Path, texts: list[str], sentencepiece_spec: TokenizerSpec, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH_BYTES", 4096)
    source = write_json_lines(tmp_path / "in.jsonl", texts)
    with open(source, "a") as file:
        file.write("{\n")
    with pytest.raises(InputError, match=r"in\.jsonl:13: bad JSON"):
        preprocess([source], str(tmp_path / "out"), sentencepiece_spec, workers=workers)
    assert names(tmp_path) == ["in.jsonl"]


def test_a_failure_leaves_the_dataset_that_was_there(
    tmp_path: Path, jsonl: Path, sentencepiece_spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = str(tmp_path / "out")
    preprocess([str(jsonl)], prefix, sentencepiece_spec)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(unfinished, "check_dataset", fail)
    with pytest.raises(OSError, match="disk full"):
        preprocess([str(jsonl)], prefix, sentencepiece_spec, overwrite=True)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_an_existing_dataset_is_replaced_only_on_request(
    tmp_path: Path, jsonl: Path, sentencepiece_spec: TokenizerSpec
) -> None:
    prefix = tmp_path / "out"
    preprocess([str(jsonl)], str(prefix), sentencepiece_spec)
    one = write_json_lines(tmp_path / "one.jsonl", ["Only one."])
    with pytest.raises(UnfinishedError, match=r"out\.bin and .*out\.idx and .* --overwrite"):
        preprocess([one], str(prefix), sentencepiece_spec)
    preprocess([one], str(prefix), sentencepiece_spec, overwrite=True)
    assert len(documents_of(prefix)) == 1


def test_input_without_any_text_is_refused(tmp_path: Path, sentencepiece_spec: TokenizerSpec) -> None:
    source = write_json_lines(tmp_path / "in.jsonl", ["", " "])
    with pytest.raises(PreprocessError, match="no document with text"):
        preprocess([source], str(tmp_path / "out"), sentencepiece_spec)
    assert names(tmp_path) == ["in.jsonl"]


def test_a_folder_is_not_a_prefix(tmp_path: Path, jsonl: Path, sentencepiece_spec: TokenizerSpec) -> None:
    with pytest.raises(UnfinishedError, match="is a folder"):
        preprocess([str(jsonl)], str(tmp_path), sentencepiece_spec)
