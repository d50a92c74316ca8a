from __future__ import annotations

import dataclasses
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_exo.data import validate
from megatron_exo.data.preprocess import preprocess
from megatron_exo.data.sidecar import Sidecar
from megatron_exo.data.tokenizer_training import train_tokenizer
from megatron_exo.data.tokenizers import TokenizerSpec
from megatron_exo.data.validate import DatasetError, check_dataset, check_sidecar

MakeDataset = Callable[..., Path]
DOCUMENTS = [[5, 6, 7, 2], [8, 2], [9, 10, 11]]
SEQUENCES_AT, TABLE_LENGTH_AT, LENGTHS_AT, POINTERS_AT, TABLE_AT = 18, 26, 34, 46, 70
"""Byte offsets of the parts of an index of three sequences."""


def patch(path: Path, offset: int, layout: str, value: int) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into(layout, data, offset, value)
    path.write_bytes(bytes(data))


def idx(prefix: Path) -> Path:
    return prefix.with_suffix(".idx")


def test_a_full_check_counts_documents_tokens_and_separators(make_dataset: MakeDataset) -> None:
    report = check_dataset(make_dataset(DOCUMENTS), vocab_size=12, eod=2, scan_tokens=True)
    assert (report.documents, report.sequences, report.tokens, report.longest_document) == (3, 3, 9, 4)
    assert (report.tokens_scanned, report.max_token) == (9, 11)
    assert (report.separators, report.documents_without_separator) == (2, 1)
    assert "documents without a final separator  1" in str(report)


def test_a_quick_check_reads_no_tokens_without_a_vocabulary(make_dataset: MakeDataset) -> None:
    report = check_dataset(make_dataset(DOCUMENTS))
    assert (report.documents, report.tokens, report.tokens_scanned, report.separators) == (3, 9, 0, None)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.uint16])
def test_every_integer_type_of_megatron_is_read(make_dataset: MakeDataset, dtype: type) -> None:
    report = check_dataset(make_dataset(DOCUMENTS, dtype), vocab_size=12, scan_tokens=True)
    assert (report.dtype, report.max_token) == (np.dtype(dtype).name, 11)


def test_a_document_of_several_sequences_is_one_document(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "set.bin"), dtype=np.uint16)
    builder.add_document(np.arange(5), [3, 2])
    builder.add_document(np.arange(4), [4])
    builder.finalize(str(tmp_path / "set.idx"))
    report = check_dataset(tmp_path / "set", eod=4, scan_tokens=True)
    assert (report.documents, report.sequences, report.documents_without_separator) == (2, 3, 1)


@pytest.mark.parametrize(("change", "state"), [(-1, "cut off"), (+2, "too long")])
def test_a_bin_of_another_size_is_refused_with_both_sizes(make_dataset: MakeDataset, change: int, state: str) -> None:
    prefix = make_dataset(DOCUMENTS)
    data = prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes((data + b"\0\0")[: len(data) + change])
    with pytest.raises(DatasetError, match=f"{state}: it has {18 + change} bytes, its index describes 18"):
        check_dataset(prefix)


@pytest.mark.parametrize("size", [0, 20, 34, 60, 93])
def test_a_cut_off_index_is_refused(make_dataset: MakeDataset, size: int) -> None:
    prefix = make_dataset(DOCUMENTS)
    idx(prefix).write_bytes(idx(prefix).read_bytes()[:size])
    with pytest.raises(DatasetError, match=r"set\.idx: the index is damaged or cut off"):
        check_dataset(prefix)


@pytest.mark.parametrize("offset", [SEQUENCES_AT, TABLE_LENGTH_AT])
def test_a_huge_count_is_refused_without_allocating_for_it(make_dataset: MakeDataset, offset: int) -> None:
    prefix = make_dataset(DOCUMENTS)
    patch(idx(prefix), offset, "<Q", 2**61)
    tracemalloc.start()
    with pytest.raises(DatasetError, match=f"bytes long, but .*{2**61}"):
        check_dataset(prefix)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    ("offset", "layout", "value", "message"),
    [
        (0, "<B", 0, "not a Megatron index"),
        (9, "<Q", 2, "not a Megatron index"),
        (17, "<B", 6, "dtype code 6 is not one of the token types"),
        (17, "<B", 77, "dtype code 77"),
        (LENGTHS_AT + 4, "<i", -2, "sequence 1 has the negative length -2"),
        (LENGTHS_AT + 4, "<i", 3, "the offset of sequence 2 contradicts the lengths"),
        (POINTERS_AT + 8, "<q", 2**40, "the offset of sequence 1 contradicts"),
        (TABLE_AT + 8, "<q", 3, "the document table does not rise from 0 to 3"),
        (TABLE_AT + 8, "<q", -1, "the document table does not rise from 0 to 3"),
        (TABLE_AT + 24, "<q", 2, "the document table does not rise from 0 to 3"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(
    make_dataset: MakeDataset, offset: int, layout: str, value: int, message: str
) -> None:
    prefix = make_dataset(DOCUMENTS)
    patch(idx(prefix), offset, layout, value)
    with pytest.raises(DatasetError, match=message) as caught:
        check_dataset(prefix)
    assert "\n" not in str(caught.value)


def test_an_empty_document_is_reported_by_number(make_dataset: MakeDataset) -> None:
    with pytest.raises(DatasetError, match=r"2 of 4 documents are empty \(number 1, 3, from 0\)"):
        check_dataset(make_dataset([[5, 2], [], [6, 2], []]))


def test_a_dataset_without_documents_is_refused(make_dataset: MakeDataset) -> None:
    with pytest.raises(DatasetError, match="the dataset is empty"):
        check_dataset(make_dataset([]))


def test_a_token_beyond_the_vocabulary_is_named_with_its_place(
    make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "_BLOCK", 2)  # so that the token lies in a later block
    prefix = make_dataset(DOCUMENTS)
    with pytest.raises(DatasetError, match=r"token 10 at position 7 \(document 2\) is outside the vocabulary of 10"):
        check_dataset(prefix, vocab_size=10, scan_tokens=True)


def test_a_negative_token_is_outside_any_vocabulary(make_dataset: MakeDataset) -> None:
    with pytest.raises(DatasetError, match=r"token -3 at position 1 \(document 0\)"):
        check_dataset(make_dataset([[1, -3]], np.int32), scan_tokens=True)


def test_the_quick_check_looks_at_both_ends(make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "_SAMPLE", 2)
    inner, last = make_dataset([[1, 1, 99, 1, 1, 1]], name="inner"), make_dataset([[1, 1, 1, 1, 1, 99]], name="last")
    assert check_dataset(inner, vocab_size=50).tokens_scanned == 4
    with pytest.raises(DatasetError, match="position 2"):
        check_dataset(inner, vocab_size=50, scan_tokens=True)
    with pytest.raises(DatasetError, match="position 5"):
        check_dataset(last, vocab_size=50)


def test_the_result_does_not_depend_on_the_block_size(
    make_dataset: MakeDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = make_dataset([list(range(1, 1 + length)) for length in range(1, 40)])
    whole = check_dataset(prefix, vocab_size=40, eod=3, scan_tokens=True)
    monkeypatch.setattr(validate, "_BLOCK", 7)
    assert check_dataset(prefix, vocab_size=40, eod=3, scan_tokens=True) == whole


def test_a_missing_dataset_says_how_to_make_one(tmp_path: Path, make_dataset: MakeDataset) -> None:
    with pytest.raises(DatasetError, match=r"nothing\.idx is missing; make one with .*tools/preprocess_data\.py"):
        check_dataset(tmp_path / "nothing")
    prefix = make_dataset(DOCUMENTS)
    with pytest.raises(DatasetError, match=r"give the path without \.bin"):
        check_dataset(f"{prefix}.bin")
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(DatasetError, match=r"set\.bin is missing"):
        check_dataset(prefix)


def test_checking_imports_neither_torch_nor_megatron_core() -> None:
    program = "import sys, megatron_exo.data.validate; print({'torch', 'megatron.core'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


# -- the description beside a dataset -----------------------------------------------------------------------


@pytest.fixture
def described(tmp_path: Path, jsonl: Path, sentencepiece_spec: TokenizerSpec) -> Path:
    preprocess([str(jsonl)], str(tmp_path / "described"), sentencepiece_spec)
    return tmp_path / "described"


def test_the_tokenizer_that_made_a_dataset_is_accepted(
    described: Path, tmp_path: Path, sentencepiece_spec: TokenizerSpec
) -> None:
    moved = tmp_path / "moved.model"
    moved.write_bytes(Path(sentencepiece_spec.model).read_bytes())
    for kind in ("SentencePieceTokenizer", "Llama2Tokenizer"):
        sidecar = check_sidecar(described, kind, moved, vocab_size=500)
        assert sidecar is not None
        assert sidecar.eod == 2


def test_another_tokenizer_of_the_same_size_is_refused(described: Path, tmp_path: Path, jsonl: Path) -> None:
    other = train_tokenizer([str(jsonl)], str(tmp_path / "other"), 500, model_type="unigram")
    with pytest.raises(DatasetError, match=r"tokenised with SentencePieceTokenizer small\.model \(500 tokens\).*other"):
        check_sidecar(described, "SentencePieceTokenizer", other)


def test_another_type_or_size_of_tokenizer_is_refused(described: Path, gpt2_spec: TokenizerSpec) -> None:
    with pytest.raises(DatasetError, match=r"the run uses GPT2BPETokenizer"):
        check_sidecar(described, gpt2_spec.type, gpt2_spec.model)
    with pytest.raises(DatasetError, match=r"the run's NullTokenizer has 640; re-tokenise"):
        check_sidecar(described, "NullTokenizer", None, vocab_size=640)
    with pytest.raises(DatasetError, match=r"cannot compare .*'TikTokenizer' is not supported"):
        check_sidecar(described, "TikTokenizer", "some.json")


def test_one_tokenizer_in_two_file_formats_is_accepted(
    tmp_path: Path, jsonl: Path, gpt2_spec: TokenizerSpec, hugging_face_spec: TokenizerSpec
) -> None:
    preprocess([str(jsonl)], str(tmp_path / "out"), gpt2_spec)
    assert check_sidecar(tmp_path / "out", hugging_face_spec.type, hugging_face_spec.model, vocab_size=400)


def test_a_dataset_of_another_program_has_no_description_to_check(make_dataset: MakeDataset) -> None:
    assert check_sidecar(make_dataset(DOCUMENTS), "SentencePieceTokenizer", "any.model", vocab_size=7) is None


def test_a_description_of_another_dataset_is_refused(described: Path, make_dataset: MakeDataset) -> None:
    prefix = make_dataset(DOCUMENTS)
    prefix.with_suffix(".json").write_bytes(described.with_suffix(".json").read_bytes())
    with pytest.raises(DatasetError, match="describes another dataset"):
        check_sidecar(prefix, "SentencePieceTokenizer", None)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"tokenizer_type": 1}'])
def test_a_broken_description_is_refused(described: Path, content: str) -> None:
    described.with_suffix(".json").write_text(content)
    with pytest.raises(DatasetError, match=r"described\.json: not a dataset description"):
        check_sidecar(described, "SentencePieceTokenizer", None)


def test_a_description_survives_saving_and_loading(described: Path, tmp_path: Path) -> None:
    sidecar = dataclasses.replace(Sidecar.load(f"{described}.json"), eod=None)
    sidecar.save(str(tmp_path / "copy.json"))
    assert Sidecar.load(str(tmp_path / "copy.json")) == sidecar
