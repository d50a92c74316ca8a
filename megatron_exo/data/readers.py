"""Documents out of text, JSON Lines, Parquet and Hugging Face datasets, one at a time.

Every error names the file and the line (or row), so that a corpus of millions of documents can be repaired.
"""

from __future__ import annotations

import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_exo.errors import UserError

COMPRESSIONS = (".gz", ".zst")
LINE_FORMATS = (".jsonl", ".json", ".txt")
SUFFIXES = (*(base + end for base in LINE_FORMATS for end in ("", *COMPRESSIONS)), ".parquet")
TEXT_SPLITS = ("file", "blank-lines")

_CHUNK = 1 << 18  # bytes read together
_COMPRESSED_CHUNK = 1 << 11  # unpacked together: a zstd block is 4 bytes at least, and 128 KiB at most when unpacked
LARGEST_DOCUMENT = 1 << 28
"""Bytes of one document (a line, or a whole text file) in a compressed file, where a few bytes can stand for many."""


class InputError(UserError):
    """An input that cannot be read: which file, which line, why."""


class StreamError(InputError):
    """A dataset that cannot be streamed now, but perhaps later: what was read of it need not be read again."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it came from (``file:line``, ``file:row N`` or a file), for messages."""

    text: str
    source: str


@dataclass(frozen=True)
class Position:
    """A place between two documents of a :class:`DocumentReader`'s inputs; all values are plain, as JSON has them.

    Args:
        input: which of ``DocumentReader.inputs``.
        documents: how many of it have been read.
        bytes_read: as ``DocumentReader.bytes_read``.
        version, stream: of a Hugging Face dataset, which one it was, and where its stream stands.
    """

    input: int = 0
    documents: int = 0
    bytes_read: int = 0
    version: str | None = None
    stream: dict[str, Any] | None = None


class DocumentReader:
    """Iterates over the documents of several inputs, in the order given, holding one document at a time.

    Args:
        inputs: files, folders (all files in a known format, sorted by path) or ``hf:NAME[:CONFIG[:SPLIT]]``.
        json_key: the field of a JSON line, or the column of a Parquet file or Hugging Face dataset.
        text_split: whether a ``.txt`` file is one document (``file``) or one per block of lines
            (``blank-lines``).
        start: begin at this :attr:`position` of an earlier reader of the same inputs.

    Raises:
        InputError: on construction for missing files and unknown formats; on iteration for unreadable content.
    """

    def __init__(
        self, inputs: Sequence[str], json_key: str = "text", text_split: str = "file", start: Position | None = None
    ) -> None:
        self.json_key = json_key
        self.text_split = text_split
        self._start = start or Position()
        self._input, self._documents = self._start.input, self._start.documents
        self._hub: _HubStream | None = None
        self.inputs = [item for name in inputs for item in _expand(name)]
        sizes = [item.stat().st_size for item in self.inputs if isinstance(item, Path)]
        self.total_bytes = sum(sizes) if len(sizes) == len(self.inputs) else None
        """Size of all files on disk, compressed; ``None`` when one input is not a file."""
        self.bytes_read = 0

    @property
    def position(self) -> Position:
        """Behind the document that was read last."""
        version, stream = (None, None) if self._hub is None else (self._hub.version, self._hub.state())
        return Position(self._input, self._documents, self.bytes_read, version, stream)

    def __iter__(self) -> Iterator[Document]:
        for number, item in enumerate(self.inputs):
            if number < self._start.input:
                self._advance(item.stat().st_size if isinstance(item, Path) else 0)
                continue
            skip = self._start.documents if number == self._start.input else 0
            self._input, self._documents = number, skip
            for document in self._read(item, skip):
                self._documents += 1
                yield document
            self._hub = None

    def _read(self, item: Path | str, skip: int) -> Iterator[Document]:
        """The documents of an input after the first ``skip``, which are passed over as cheaply as the format allows."""
        if isinstance(item, str):
            self._hub = _HubStream(item, self.json_key, self._start if skip else Position())
            return iter(self._hub)
        if item.suffix == ".parquet":
            return _read_parquet(item, self.json_key, self._advance, skip)
        if _base_suffix(item) == ".txt":
            read = _read_text_file if self.text_split == "file" else _read_text_blocks
            return itertools.islice(read(item, self._advance), skip, None)
        return _read_json_lines(item, self.json_key, self._advance, skip)

    def _advance(self, count: int) -> None:
        self.bytes_read += count


Advance = Callable[[int], None]
"""Called with the number of bytes taken from a file."""


def _expand(name: str) -> list[Path | str]:
    if name.startswith("hf:"):
        if not 1 <= name.count(":") <= 3 or name == "hf:":
            raise InputError(f"{name}: a Hugging Face dataset is written hf:NAME[:CONFIG[:SPLIT]]")
        return [name]
    path = Path(name)
    if path.is_dir():
        files = sorted(item for item in path.rglob("*") if item.is_file() and item.name.endswith(SUFFIXES))
        if not files:
            raise InputError(f"{name}: the folder holds no file that ends in {', '.join(SUFFIXES)}")
        return list(files)
    if not path.is_file():
        raise InputError(f"{name}: no such file; --input takes files, folders or hf:NAME[:CONFIG[:SPLIT]]")
    if not name.endswith(SUFFIXES):
        raise InputError(f"{name}: unknown format; the name must end in {', '.join(SUFFIXES)}")
    return [path]


def _base_suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


# -- bytes and lines ----------------------------------------------------------------------------------------


def _chunks(path: Path, advance: Advance) -> Iterator[bytes]:
    """The content of a file, decompressed, piece by piece."""
    try:
        with open(path, "rb") as file:
            raw = _raw_chunks(file, advance)
            yield from raw if path.suffix not in COMPRESSIONS else _decompress(raw, path)
    except OSError as error:
        raise InputError(f"{path}: cannot read it ({error.strerror})") from None


def _raw_chunks(file: BinaryIO, advance: Advance) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        advance(len(chunk))
        yield chunk


def _decompress(chunks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """Decompress gzip or zstd, with any number of members (frames) in a file; a cut-off file is an error."""
    new_decompressor, errors = _decompressor(path)
    decompressor: Any = None
    for read in chunks:
        for begin in range(0, len(read), _COMPRESSED_CHUNK):
            chunk = read[begin : begin + _COMPRESSED_CHUNK]
            while chunk:
                if decompressor is None:
                    decompressor = new_decompressor()
                try:
                    yield decompressor.decompress(chunk)
                except errors as error:
                    raise InputError(f"{path}: damaged {path.suffix[1:]} data ({error})") from None
                chunk = decompressor.unused_data if decompressor.eof else b""
                if decompressor.eof:
                    decompressor = None
    if decompressor is not None:
        raise InputError(f"{path}: the compressed file is cut off; copy or download it again")


def _bounded(chunks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """The chunks of one document; a compressed file may not make more of it than memory is for."""
    size = 0
    for chunk in chunks:
        size += len(chunk)
        _check_size(size, path)
        yield chunk


def _check_size(size: int, path: Path) -> None:
    if size > LARGEST_DOCUMENT and path.suffix in COMPRESSIONS:
        raise InputError(
            f"{path}: a document of more than {LARGEST_DOCUMENT >> 20} MiB; if it should hold that, decompress the file"
        )


def _decompressor(path: Path) -> tuple[Callable[[], Any], type[Exception]]:
    if path.suffix == ".gz":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    try:
        import zstandard
    except ImportError:
        raise InputError(f"{path}: reading .zst needs the package zstandard (pip install zstandard)") from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


def _lines(path: Path, advance: Advance) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and lines without their ends (LF or CRLF)."""
    number, size = 0, 0
    pending: list[bytes] = []
    for chunk in _chunks(path, advance):
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            pending.append(piece)
            number += 1
            yield number, _decode(b"".join(pending), path, number)
            pending.clear()
            size = 0
        pending.append(rest)
        size += len(rest)
        _check_size(size, path)
    if last := b"".join(pending):
        yield number + 1, _decode(last, path, number + 1)


def _decode(line: bytes, path: Path, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r")
    except UnicodeDecodeError as error:
        number += line.count(b"\n", 0, error.start)
        raise InputError(f"{path}:{number}: not UTF-8 ({error.reason}); convert the file to UTF-8") from None


# -- formats ------------------------------------------------------------------------------------------------


def _read_text_file(path: Path, advance: Advance) -> Iterator[Document]:
    text = _decode(b"".join(_bounded(_chunks(path, advance), path)), path, 1)
    yield Document(text.replace("\r\n", "\n"), str(path))


def _read_text_blocks(path: Path, advance: Advance) -> Iterator[Document]:
    block: list[str] = []
    first = 1
    for number, line in _lines(path, advance):
        if line.strip():
            first = first if block else number
            block.append(line)
        elif block:
            yield Document("\n".join(block), f"{path}:{first}")
            block = []
    if block:
        yield Document("\n".join(block), f"{path}:{first}")


def _read_json_lines(path: Path, key: str, advance: Advance, skip: int = 0) -> Iterator[Document]:
    for number, line in _lines(path, advance):
        if not line.strip():  # the customary empty last line
            continue
        if skip > 0:
            skip -= 1
            continue
        source = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{source}: bad JSON ({error.msg} at column {error.colno})") from None
        except ValueError:  # Python reads no number of thousands of digits
            raise InputError(f"{source}: bad JSON (a number of too many digits)") from None
        except RecursionError:
            raise InputError(f"{source}: bad JSON (nested too deeply)") from None
        if not isinstance(record, dict):
            raise InputError(f"{source}: expected an object with the key {key!r}, found a {type(record).__name__}")
        yield _document(record, key, source)


def _read_parquet(path: Path, key: str, advance: Advance, skip: int = 0) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs the package pyarrow (pip install pyarrow)") from None
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if key not in columns:
                raise InputError(f"{path}: no column {key!r}; it has {', '.join(columns[:8])} (choose with --json-key)")
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                wanted = [group] if row + rows > skip else []
                for batch in file.iter_batches(batch_size=1024, row_groups=wanted, columns=[key]):
                    for value in batch.column(0).to_pylist():
                        if row >= skip:
                            yield _document({key: value}, key, f"{path}:row {row}")
                        row += 1
                row += 0 if wanted else rows
                advance(path.stat().st_size // file.num_row_groups)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a readable Parquet file after row {row} ({_first_line(error)})") from None


class _HubStream:
    """The documents of ``hf:NAME[:CONFIG[:SPLIT]]`` behind a position, and where the stream stands.

    Raises:
        InputError: no package datasets that is new enough, or a record without a text.
        StreamError: the dataset cannot be streamed, or it is no longer the one that the position is in.
    """

    def __init__(self, name: str, key: str, start: Position) -> None:
        self.name = name
        self.key = key
        self.row = start.documents
        with self._stream_errors():
            self._dataset, self.version = _open_hub(name, start.version)
            if start.stream is not None and self.version == start.version:
                self._dataset.load_state_dict(start.stream)
        if start.stream is not None and self.version != start.version:
            raise StreamError(f"{name}: it has changed since row {self.row} was read; pass --overwrite to begin anew")

    def state(self) -> dict[str, Any]:
        """Where the stream stands, behind the record that was read last."""
        return self._dataset.state_dict()

    def __iter__(self) -> Iterator[Document]:
        with self._stream_errors():
            for record in self._dataset:
                yield _document(record, self.key, f"{self.name}:row {self.row}")
                self.row += 1

    @contextmanager
    def _stream_errors(self) -> Iterator[None]:
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # the hub's client raises whatever its many backends raise
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise StreamError(
                f"{self.name}: cannot stream it from the Hugging Face hub after row {self.row} ({reason})"
            ) from None


def _open_hub(name: str, version: str | None) -> tuple[Any, str]:
    """The streamed dataset, and what tells its content from another: a commit on the hub, a digest of local files.

    Args:
        version: of an earlier call, which is opened again if it can still be had.
    """
    dataset, config, split = (*name.removeprefix("hf:").split(":"), "", "")[:3]
    try:
        import datasets
    except ImportError:
        raise InputError(f"{name}: needs the package datasets (pip install datasets)") from None
    if datasets.__version__.split(".")[0] in ("1", "2", "3"):
        raise InputError(f"{name}: needs datasets 4 or later; earlier ones can run a script that comes with the data")
    revision = None if os.path.exists(dataset) else version
    builder = datasets.load_dataset_builder(dataset, config or None, revision=revision)
    return builder.as_streaming_dataset(split=split or "train"), str(builder.hash)


def _document(record: dict[str, Any], key: str, source: str) -> Document:
    if key not in record:
        found = ", ".join(map(repr, list(record)[:8])) or "no keys"
        raise InputError(f"{source}: no key {key!r}; it has {found} (choose with --json-key)")
    text = record[key]
    if not isinstance(text, str):
        raise InputError(f"{source}: {key!r} is not a string but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{source}: {key!r} holds half of a surrogate pair, which is not text") from None
    return Document(text, source)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
