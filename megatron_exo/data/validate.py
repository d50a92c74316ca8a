"""Check a Megatron dataset (``PREFIX.bin`` and ``PREFIX.idx``) before a run depends on it.

Both files are read as plain data (:mod:`megatron_exo.data.index_format`), and every count is held against the size of
the file before anything is allocated for it. Only numpy is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_exo.data.index_format import HEADER, MAGIC, TOKEN_DTYPES, VERSION
from megatron_exo.data.shard_format import is_token_shard
from megatron_exo.data.sidecar import Sidecar
from megatron_exo.data.tokenizers import TokenizerError, TokenizerSpec, fingerprint
from megatron_exo.errors import UserError

_BLOCK = 1 << 22  # entries of the index, or tokens, looked at together
_SAMPLE = 1 << 20  # tokens looked at from either end in the quick check


class DatasetError(UserError):
    """A dataset that a run must not start on: which file, what is wrong, what to do."""


@dataclass(frozen=True)
class DatasetReport:
    """What a dataset that passed holds. ``str()`` is a small table."""

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    longest_document: int
    tokens_scanned: int
    """How many tokens were compared with the vocabulary."""
    max_token: int | None
    """Largest id among the scanned tokens; ``None`` if none were scanned."""
    separators: int | None
    """Tokens equal to the end-of-document id; ``None`` unless all tokens were scanned for a known id."""
    documents_without_separator: int | None
    """Documents whose last token is another one; ``None`` as above."""

    def __str__(self) -> str:
        def count(value: int | None) -> str:
            return "not checked" if value is None else f"{value:,}"

        rows = [
            ("dataset", self.prefix),
            ("dtype", self.dtype),
            ("documents", count(self.documents)),
            ("sequences", count(self.sequences)),
            ("tokens", count(self.tokens)),
            ("longest document", f"{self.longest_document:,} tokens"),
            ("tokens scanned", count(self.tokens_scanned)),
            ("largest token id", count(self.max_token)),
            ("separators", count(self.separators)),
            ("documents without a final separator", count(self.documents_without_separator)),
        ]
        return "\n".join(f"{name:<37}{value}" for name, value in rows)


def check_dataset(
    prefix: str | Path, vocab_size: int | None = None, eod: int | None = None, scan_tokens: bool = False
) -> DatasetReport:
    """Validate the structure of a dataset, and its tokens.

    Args:
        prefix: what ``--data-path`` takes: the path without ``.bin`` or ``.idx``.
        vocab_size: every scanned token must be below it (and never negative).
        eod: the end-of-document id, to count separators in a full scan.
        scan_tokens: read the whole ``.bin`` in bounded pieces. Otherwise the first and last million tokens are
            read if ``vocab_size`` is given, which finds most wrong tokenizers at the start of a run.

    Raises:
        DatasetError: at the first defect: files missing, cut off or too long, an index that contradicts itself,
            an empty document, a token outside the vocabulary.
    """
    index = _Index(str(prefix))
    document_ends = index.check()
    tokens = int(document_ends[-1])
    scanned, max_token, separators = _scan(index, document_ends, vocab_size, eod, scan_tokens)
    without_separator = None
    if scan_tokens and eod is not None:
        without_separator = int((index.tokens()[document_ends - 1] != eod).sum())
    return DatasetReport(
        prefix=str(prefix),
        dtype=index.dtype.name,
        documents=len(document_ends),
        sequences=index.num_sequences,
        tokens=tokens,
        longest_document=int(np.diff(document_ends, prepend=0).max()),
        tokens_scanned=scanned,
        max_token=max_token,
        separators=separators if scan_tokens and eod is not None else None,
        documents_without_separator=without_separator,
    )


class _Index:
    """An opened ``.idx``, with its arrays mapped, not read."""

    def __init__(self, prefix: str) -> None:
        self.idx_path, self.bin_path = f"{prefix}.idx", f"{prefix}.bin"
        for path in (self.idx_path, self.bin_path):
            if not os.path.isfile(path):
                raise _missing(prefix, path)
        size = os.path.getsize(self.idx_path)
        with open(self.idx_path, "rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise self._broken(f"{size} bytes are fewer than the header's {HEADER.size}")
        magic, version, code, self.num_sequences, table_length = HEADER.unpack(header)
        if magic != MAGIC or version != VERSION:
            raise DatasetError(f"{self.idx_path}: not a Megatron index (it begins {header[:12]!r})")
        if code not in TOKEN_DTYPES:
            known = ", ".join(f"{key} {np.dtype(name).name}" for key, name in TOKEN_DTYPES.items())
            raise DatasetError(f"{self.idx_path}: dtype code {code} is not one of the token types ({known})")
        expected = HEADER.size + 12 * self.num_sequences + 8 * table_length
        if size != expected:
            raise self._broken(
                f"it is {size} bytes long, but {self.num_sequences} sequences and a document table of "
                f"{table_length} take {expected}"
            )
        if self.num_sequences == 0 or table_length < 2:
            raise DatasetError(f"{self.idx_path}: the dataset is empty (it holds no documents)")
        self.dtype = np.dtype(TOKEN_DTYPES[code])
        self.lengths = self._array("<i4", HEADER.size, self.num_sequences)
        self.pointers = self._array("<i8", HEADER.size + 4 * self.num_sequences, self.num_sequences)
        self.table = self._array("<i8", HEADER.size + 12 * self.num_sequences, table_length)

    def _array(self, dtype: str, offset: int, count: int) -> NDArray:
        return np.memmap(self.idx_path, dtype=dtype, mode="r", offset=offset, shape=(count,))

    def _broken(self, reason: str) -> DatasetError:
        return DatasetError(f"{self.idx_path}: the index is damaged or cut off: {reason}; copy or make it again")

    def tokens(self) -> NDArray:
        """The content of the ``.bin``, ``[tokens]``, mapped."""
        return np.memmap(self.bin_path, dtype=self.dtype, mode="r")

    def check(self) -> NDArray[np.int64]:
        """Hold lengths, offsets, document table and the size of the ``.bin`` against each other.

        Returns:
            The number of tokens up to and including each document, ``[documents]``.
        """
        sequence_bounds = np.zeros(self.num_sequences + 1, dtype=np.int64)
        total = 0
        for begin in range(0, self.num_sequences, _BLOCK):
            lengths = self.lengths[begin : begin + _BLOCK].astype(np.int64)
            if lengths.min() < 0:
                bad = int(np.argmax(lengths < 0))
                raise self._broken(f"sequence {begin + bad} has the negative length {lengths[bad]}")
            ends = total + np.cumsum(lengths)
            wrong = self.pointers[begin : begin + _BLOCK] != (ends - lengths) * self.dtype.itemsize
            if wrong.any():
                raise self._broken(f"the offset of sequence {begin + int(np.argmax(wrong))} contradicts the lengths")
            sequence_bounds[begin + 1 : begin + 1 + _BLOCK] = ends
            total = int(ends[-1])
        size, expected = os.path.getsize(self.bin_path), total * self.dtype.itemsize
        if size != expected:
            state = "cut off" if size < expected else "too long"
            raise DatasetError(
                f"{self.bin_path}: the file is {state}: it has {size} bytes, its index describes {expected} "
                f"({total} tokens of {self.dtype.itemsize}); copy or make it again"
            )
        if self.table[0] != 0 or self.table[-1] != self.num_sequences or (np.diff(self.table) < 0).any():
            raise self._broken(f"the document table does not rise from 0 to {self.num_sequences}")
        document_bounds = sequence_bounds[self.table]
        empty = np.flatnonzero(np.diff(document_bounds) == 0)
        if len(empty):
            shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
            raise DatasetError(
                f"{self.idx_path}: {len(empty)} of {len(self.table) - 1} documents are empty (number {shown}, from 0); "
                "Megatron fails on them: make the dataset again with tools/preprocess_data.py, which leaves them out"
            )
        return document_bounds[1:]


def _missing(prefix: str, path: str) -> DatasetError:
    """What to say where a file of a dataset is not there."""
    stem, suffix = os.path.splitext(prefix)
    for file in (f"{prefix}.bin", prefix):
        if not os.path.isfile(f"{os.path.splitext(file)[0]}.idx") and is_token_shard(file):
            return DatasetError(
                f"no dataset at {prefix}: {file} is a shard of tokens without an index; make a dataset of it with "
                f"'python tools/convert_shards.py --input {file} --output-prefix PREFIX'"
            )
    if suffix in (".bin", ".idx"):
        return DatasetError(f"no dataset at {prefix}; give the path without {suffix}, that is {stem}")
    if os.path.isdir(f"{prefix}.partial"):
        return DatasetError(
            f"no dataset at {prefix}: it is unfinished ({prefix}.partial); repeat the command that makes it"
        )
    return DatasetError(
        f"no dataset at {prefix}: {path} is missing; make one with "
        "'python tools/preprocess_data.py --input FILES --output-prefix PREFIX ...'"
    )


def _scan(
    index: _Index, document_ends: NDArray[np.int64], vocab_size: int | None, eod: int | None, scan_tokens: bool
) -> tuple[int, int | None, int]:
    """Compare tokens with the vocabulary; returns how many, the largest, and how many equal ``eod``."""
    tokens = index.tokens()
    scanned, separators = 0, 0
    largest: int | None = None
    for begin, end in _ranges(len(tokens), scan_tokens, vocab_size):
        block = tokens[begin:end]
        low, high = int(block.min()), int(block.max())
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            limit = np.inf if vocab_size is None else vocab_size
            offset = int(np.argmax((block < 0) | (block >= limit)))
            position = begin + offset
            document = int(np.searchsorted(document_ends, position, side="right"))
            vocabulary = "" if vocab_size is None else f" of {vocab_size}"
            raise DatasetError(
                f"{index.bin_path}: token {block[offset]} at position {position} (document {document}) is outside "
                f"the vocabulary{vocabulary}; the dataset was made with another tokenizer: re-tokenise it or pass "
                "the right --tokenizer-model"
            )
        scanned += len(block)
        largest = high if largest is None else max(largest, high)
        separators += int(np.count_nonzero(block == eod)) if eod is not None else 0
    return scanned, largest, separators


def _ranges(count: int, scan_tokens: bool, vocab_size: int | None) -> Iterator[tuple[int, int]]:
    if scan_tokens or (vocab_size is not None and count <= 2 * _SAMPLE):
        yield from ((begin, min(begin + _BLOCK, count)) for begin in range(0, count, _BLOCK))
    elif vocab_size is not None:
        yield 0, _SAMPLE
        yield count - _SAMPLE, count


def check_sidecar(
    prefix: str | Path, tokenizer_type: str, tokenizer_model_path: str | Path | None, vocab_size: int | None = None
) -> Sidecar | None:
    """Compare the tokenizer of a run with the one that made a dataset.

    Two tokenizers are the same if their files have the same digest or if they behave the same, so GPT-2 from
    ``vocab.json`` agrees with GPT-2 from ``tokenizer.json``.

    Args:
        prefix: a dataset that passed :func:`check_dataset`.
        tokenizer_type, tokenizer_model_path: as in ``--tokenizer-type`` and ``--tokenizer-model``; without a
            path, or for data that came in tokens, only the vocabulary's size is compared.
        vocab_size: the size of the run's tokenizer, before any padding.

    Returns:
        The dataset's description, or ``None`` if it has none (it was made by another program).

    Raises:
        DatasetError: if the tokenizers differ, if the run's is of a type that preprocessing does not know, or if
            the description cannot be read or belongs to another ``.bin``.
    """
    path = f"{prefix}.json"
    if not os.path.isfile(path):
        return None
    try:
        sidecar = Sidecar.load(path)
    except ValueError as error:
        raise DatasetError(str(error)) from None
    size, described = os.path.getsize(f"{prefix}.bin"), sidecar.tokens * np.dtype(sidecar.dtype).itemsize
    if size != described:
        raise DatasetError(
            f"{path} describes another dataset ({described} bytes) than {prefix}.bin ({size} bytes); "
            "make the dataset again, or remove the description to go on without this check"
        )
    named = " ".join(filter(None, (sidecar.tokenizer_type, sidecar.tokenizer_model)))
    made_with = f"{named} ({sidecar.vocab_size} tokens)"
    remedy = "re-tokenise or pass the right --tokenizer-model"
    if vocab_size is not None and vocab_size != sidecar.vocab_size:
        raise DatasetError(
            f"dataset {prefix} was tokenised with {made_with}, the run's {tokenizer_type} has {vocab_size}; {remedy}"
        )
    if tokenizer_model_path is not None and sidecar.tokenizer_fingerprint is not None:
        try:
            spec = TokenizerSpec(tokenizer_type, str(tokenizer_model_path))
            same = spec.sha256() == sidecar.tokenizer_sha256
            same = same or fingerprint(spec.load()) == sidecar.tokenizer_fingerprint
        except TokenizerError as error:
            raise DatasetError(f"cannot compare the tokenizer of dataset {prefix} with the run's: {error}") from None
        if not same:
            raise DatasetError(
                f"dataset {prefix} was tokenised with {made_with}, the run uses {tokenizer_type} "
                f"{tokenizer_model_path}, which is another one of that size or type; {remedy}"
            )
    return sidecar
