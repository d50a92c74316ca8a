from __future__ import annotations

import gzip
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron_exo.data.readers import Document, DocumentReader, InputError, Position, StreamError

TEXTS = ["One.\n\nTwo, with a blank line.", "Grüße, 世界", "x" * 700_000, ""]


def read(*inputs: Path | str, **options: str) -> list[Document]:
    return list(DocumentReader([str(item) for item in inputs], **options))


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def compress(data: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(data)
    return pytest.importorskip("zstandard").compress(data) if suffix == ".zst" else data


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_come_back_whole_with_their_line_numbers(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(json_lines(TEXTS), suffix))
    assert read(path) == [Document(text, f"{path}:{number}") for number, text in enumerate(TEXTS, start=1)]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_of_several_members_is_read_to_its_end(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"".join(compress(json_lines([text]), suffix) for text in TEXTS))
    assert [document.text for document in read(path)] == TEXTS


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_cut_off_compressed_file_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(json_lines(TEXTS), suffix)[:-6])
    with pytest.raises(InputError, match=r"a\.jsonl\..*cut off"):
        read(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_only_claims_to_be_compressed_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    compress(b"", suffix)  # skips without the package
    path.write_bytes(json_lines(TEXTS))
    with pytest.raises(InputError, match="damaged"):
        read(path)


def test_parquet_is_read_by_row_group(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": range(4), "content": TEXTS}), path, row_group_size=2)
    documents = read(path, json_key="content")
    assert documents == [Document(text, f"{path}:row {row}") for row, text in enumerate(TEXTS)]
    with pytest.raises(InputError, match=r"no column 'text'; it has id, content"):
        read(path)


def test_a_damaged_parquet_file_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InputError, match=r"a\.parquet: not a readable Parquet file"):
        read(tmp_path / "a.parquet")


def test_a_text_file_is_one_document_or_one_per_block(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"One\r\nstill one\r\n\r\n \r\nTwo")
    assert read(path) == [Document("One\nstill one\n\n \nTwo", str(path))]
    assert read(path, text_split="blank-lines") == [
        Document("One\nstill one", f"{path}:1"),
        Document("Two", f"{path}:5"),
    ]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json_lines(["One"]))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfTwo")
    assert [document.text for document in read(tmp_path)] == ["One", "Two"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', r"a\.jsonl:3: bad JSON \(Unterminated string.* at column 10\)"),
        (b'{"body": "x"}', r"a\.jsonl:3: no key 'text'; it has 'body'"),
        (b'["x"]', r"a\.jsonl:3: expected an object with the key 'text', found a list"),
        (b'{"text": null}', r"a\.jsonl:3: 'text' is not a string but NoneType"),
        (b'{"text": "\xff"}', r"a\.jsonl:3: not UTF-8"),
        (b'{"text": "\\ud800"}', r"a\.jsonl:3: 'text' holds half of a surrogate pair"),
        (b"[" * 200_000, r"a\.jsonl:3: bad JSON \(nested too deeply\)"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["One"]) + b"\n" + line + b"\n" + json_lines(["Four"]))
    with pytest.raises(InputError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_an_undecodable_text_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"One\nTwo\nThr\xe9e\n")
    with pytest.raises(InputError, match=r"a\.txt:3: not UTF-8"):
        read(tmp_path / "a.txt")


def test_a_folder_stands_for_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "a/1.jsonl", "a/readme.rst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(json_lines([name]))
    assert [document.text for document in read(tmp_path)] == ["a/1.jsonl", "b/2.jsonl"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing.jsonl", "no such file"), ("a.doc", "unknown format"), ("empty", "holds no file"), ("hf:", "is written")],
)
def test_an_unusable_input_is_refused_before_anything_is_read(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "a.doc").write_text("text")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=message):
        DocumentReader([name if name.startswith("hf:") else str(tmp_path / name)])


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(compress(json_lines(TEXTS), ".gz"))
    (tmp_path / "b.txt").write_text("text")
    reader = DocumentReader([str(tmp_path)])
    assert len(list(reader)) == len(TEXTS) + 1
    assert reader.bytes_read == reader.total_bytes


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    """A Hugging Face dataset in a folder, which datasets reads as one of the hub: two files, 5 rows in all."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    folder = tmp_path / "org"
    folder.mkdir()
    for name, texts in (("train-0", ["One", "Two", "Three"]), ("train-1", ["Four", "Five"]), ("test-0", ["Six"])):
        parquet.write_table(pyarrow.table({"text": texts}), folder / f"{name}.parquet", row_group_size=2)
    return folder


def test_a_hugging_face_dataset_is_streamed(hub_folder: Path) -> None:
    texts = ["One", "Two", "Three", "Four", "Five"]
    name = f"hf:{hub_folder}"
    assert read(name) == [Document(text, f"{name}:row {row}") for row, text in enumerate(texts)]
    assert [document.text for document in read(f"{name}:default:test")] == ["Six"]


def test_what_cannot_be_streamed_and_a_missing_package_are_one_line(
    hub_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StreamError, match=r"cannot stream .* after row 0 \(.*: .*nonesuch.*\)$") as caught:
        read(f"hf:{hub_folder}:default:nonesuch")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no key 'body'; it has 'text'"):
        read(f"hf:{hub_folder}", json_key="body")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        read("hf:x")


# -- going on -----------------------------------------------------------------------------------------------


def test_reading_goes_on_behind_any_document_of_any_input(tmp_path: Path, hub_folder: Path) -> None:
    """Also behind those of a position that was written as JSON, which is how it survives a crash."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.jsonl.gz").write_bytes(compress(b"\n" + json_lines(["0", "1"]) + b"\n" + json_lines(["2"]), ".gz"))
    parquet.write_table(pyarrow.table({"text": list("34567")}), tmp_path / "b.parquet", row_group_size=2)
    (tmp_path / "c.txt").write_text("8\n\n9")
    inputs = [str(tmp_path / name) for name in ("a.jsonl.gz", "b.parquet", "c.txt")] + [f"hf:{hub_folder}"]
    for split in ("file", "blank-lines"):
        reader = DocumentReader(inputs, text_split=split)
        whole, positions = [], []
        for document in reader:
            whole.append(document)
            positions.append(json.loads(json.dumps(asdict(reader.position))))
        assert len(whole) == (15 if split == "blank-lines" else 14)
        for number, position in enumerate(positions, start=1):
            assert list(DocumentReader(inputs, text_split=split, start=Position(**position))) == whole[number:]


def test_a_dataset_that_has_changed_is_not_gone_on_with(hub_folder: Path) -> None:
    name = f"hf:{hub_folder}"
    reader = DocumentReader([name])
    next(iter(reader))
    position = reader.position
    (hub_folder / "train-1.parquet").unlink()
    with pytest.raises(StreamError, match="it has changed since row 1 was read; pass --overwrite to begin anew"):
        list(DocumentReader([name], start=position))
