from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_exo.data.readers import Document, DocumentReader, InputError

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


def test_a_hugging_face_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> list[dict[str, str]]:
        asked.append((name, config, split, streaming))
        return [{"text": "One"}, {"text": "Two"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read("hf:org/name") == [Document("One", "hf:org/name:row 0"), Document("Two", "hf:org/name:row 1")]
    read("hf:org/name:sample-10BT:validation")
    assert asked == [("org/name", None, "train", True), ("org/name", "sample-10BT", "validation", True)]


def test_an_unreachable_hub_and_a_missing_package_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Couldn't reach the Hub\nafter 5 tries")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(InputError, match=r"hf:x: cannot stream .*ConnectionError: Couldn't reach the Hub\)$"):
        read("hf:x")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match="pip install datasets"):
        read("hf:x")
