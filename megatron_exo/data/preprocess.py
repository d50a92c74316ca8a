"""Tokenise documents into a Megatron dataset, with several processes and bounded memory.

The result depends on the inputs and the tokenizer alone: documents keep their order whatever the number of
workers. Files appear under their final names only when they are complete and have passed validation.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_exo.data.progress import Progress
from megatron_exo.data.readers import Document, DocumentReader
from megatron_exo.data.sidecar import Sidecar
from megatron_exo.data.tokenizers import Tokenizer, TokenizerError, TokenizerSpec, fingerprint
from megatron_exo.data.validate import check_dataset
from megatron_exo.errors import UserError

_BATCH_BYTES = 1 << 20  # of text per task: large against the cost of handing it over, small against memory
_BATCH_DOCUMENTS = 512
_TASKS_PER_WORKER = 4
_EMPTY_SHOWN = 5


class PreprocessError(UserError):
    """A request that cannot be carried out: what, why, what instead."""


@dataclass(frozen=True)
class PreprocessResult:
    """What was written, and the documents without text that were left out."""

    sidecar: Sidecar
    empty: list[str]
    """The first few of them: ``document 17 (corpus.jsonl:18)``."""


@dataclass(frozen=True)
class _Encoded:
    """A tokenised batch: all ids one after the other, and the length of each document (0: without text)."""

    ids: NDArray
    lengths: list[int]
    sources: list[str]
    text_bytes: int


def preprocess(
    inputs: Sequence[str],
    prefix: str,
    tokenizer_spec: TokenizerSpec,
    *,
    json_key: str = "text",
    text_split: str = "file",
    append_eod: bool = True,
    skip_empty: bool = True,
    workers: int = 1,
    overwrite: bool = False,
) -> PreprocessResult:
    """Write ``PREFIX.bin``, ``PREFIX.idx`` (Megatron's format) and ``PREFIX.json``; ``PREFIX`` is the ``--data-path``.

    Args:
        inputs, json_key, text_split: see :class:`megatron_exo.data.readers.DocumentReader`.
        append_eod: end every document with the tokenizer's end-of-document id.
        skip_empty: leave out documents without text (whitespace only) and report them, instead of failing.
        workers: number of processes; 1 tokenises in this one.
        overwrite: replace an existing dataset.

    Raises:
        InputError, TokenizerError: for what cannot be read.
        PreprocessError: if the output exists, no document holds text, or ``skip_empty`` is false and one does not.
    """
    _refuse_overwriting(prefix, overwrite)
    tokenizer = tokenizer_spec.load()
    if append_eod and tokenizer.eod is None:
        raise TokenizerError(
            f"{tokenizer_spec.model} names no end-of-sequence token to separate documents with; add eos_token to its "
            "tokenizer_config.json, or pass --no-append-eod"
        )
    reader = DocumentReader(inputs, json_key, text_split)
    builder_class, dtype = _builder_and_dtype(tokenizer.vocab_size)
    encode = functools.partial(_encode, dtype=dtype.__name__, eod=tokenizer.eod if append_eod else None)
    batches = _ordered_map(encode, _batches(reader), tokenizer, tokenizer_spec, workers)

    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    partial = f"{prefix}.partial-{os.getpid()}"
    try:
        builder = builder_class(f"{partial}.bin", dtype=dtype)
        with contextlib.closing(builder.data_file), contextlib.closing(batches):
            counts = _write(builder, batches, Progress("tokenise", reader.total_bytes), reader, skip_empty)
        if counts.documents == 0:
            raise PreprocessError(f"no document with text in {', '.join(inputs)}; nothing is written")
        builder.finalize(f"{partial}.idx")
        check_dataset(partial, vocab_size=tokenizer.vocab_size)
        sidecar = Sidecar(
            tokenizer_type=tokenizer_spec.type,
            tokenizer_model=Path(tokenizer_spec.model).name,
            tokenizer_sha256=tokenizer_spec.sha256(),
            tokenizer_fingerprint=fingerprint(tokenizer),
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            append_eod=append_eod,
            dtype=dtype.__name__,
            documents=counts.documents,
            tokens=counts.tokens,
            empty_documents=counts.empty,
            inputs=[name if name.startswith("hf:") else Path(name).name for name in inputs],
        )
        sidecar.save(f"{partial}.json")
        _publish(partial, prefix)
    finally:
        for suffix in (".bin", ".idx", ".json"):
            Path(partial + suffix).unlink(missing_ok=True)
    return PreprocessResult(sidecar, counts.empty_shown)


def _refuse_overwriting(prefix: str, overwrite: bool) -> None:
    if Path(prefix).name == "" or Path(prefix).is_dir():
        raise PreprocessError(f"{prefix} is a folder; --output-prefix is a path without suffix, such as {prefix}/train")
    existing = [prefix + suffix for suffix in (".bin", ".idx", ".json") if os.path.exists(prefix + suffix)]
    if existing and not overwrite:
        raise PreprocessError(f"{' and '.join(existing)} exist(s) already; pass --overwrite or another --output-prefix")


def _publish(partial: str, prefix: str) -> None:
    """Rename the finished files, the index first to go and last to come: without it there is no dataset."""
    Path(f"{prefix}.idx").unlink(missing_ok=True)
    for suffix in (".bin", ".json", ".idx"):
        os.replace(partial + suffix, prefix + suffix)


def _builder_and_dtype(vocab_size: int) -> tuple[type[Any], type[Any]]:
    """Megatron's builder, and the type that it would choose for the ids of a vocabulary."""
    with warnings.catch_warnings():  # about kernels that tokenising does not use
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    return IndexedDatasetBuilder, DType.optimal_dtype(vocab_size)


# -- writing ------------------------------------------------------------------------------------------------


@dataclass
class _Counts:
    documents: int
    tokens: int
    empty: int
    empty_shown: list[str]


def _write(
    builder: Any, batches: Iterator[_Encoded], progress: Progress, reader: DocumentReader, skip_empty: bool
) -> _Counts:
    counts = _Counts(0, 0, 0, [])
    text_bytes = 0
    for batch in batches:
        begin = 0
        for length, source in zip(batch.lengths, batch.sources, strict=True):
            if length == 0:
                description = f"document {counts.documents + counts.empty} ({source})"
                if not skip_empty:
                    raise PreprocessError(f"{description} is empty; remove it, or pass --empty-documents skip")
                counts.empty += 1
                if counts.empty <= _EMPTY_SHOWN:
                    counts.empty_shown.append(description)
                continue
            builder.add_document(batch.ids[begin : begin + length], [length])
            counts.documents += 1
            begin += length
        counts.tokens += begin
        text_bytes += batch.text_bytes
        progress.update(counts.documents, text_bytes, reader.bytes_read)
    progress.finish(counts.documents, text_bytes)
    return counts


# -- tokenising ---------------------------------------------------------------------------------------------


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(batch: list[Document], tokenizer: Tokenizer, dtype: str, eod: int | None) -> _Encoded:
    pieces = tokenizer.encode_batch([document.text if document.text.strip() else "" for document in batch])
    if eod is not None:
        pieces = [[*ids, eod] if ids else ids for ids in pieces]
    return _Encoded(
        ids=np.array([index for ids in pieces for index in ids], dtype=dtype),
        lengths=[len(ids) for ids in pieces],
        sources=[document.source for document in batch],
        text_bytes=sum(len(document.text.encode()) for document in batch),
    )


_worker_tokenizer: Tokenizer


def _start_worker(spec: TokenizerSpec) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which then ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    global _worker_tokenizer
    _worker_tokenizer = spec.load()


def _encode_in_worker(encode: Callable[..., _Encoded], batch: list[Document]) -> _Encoded:
    return encode(batch, tokenizer=_worker_tokenizer)


def _ordered_map(
    encode: Callable[..., _Encoded],
    batches: Iterator[list[Document]],
    tokenizer: Tokenizer,
    spec: TokenizerSpec,
    workers: int,
) -> Generator[_Encoded]:
    """Encode batches in order, with at most a few per worker in flight, so that memory stays bounded."""
    if workers <= 1:
        yield from (encode(batch, tokenizer=tokenizer) for batch in batches)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=(spec,))
    pending: deque[Future[_Encoded]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode_in_worker, encode, batch))
            if len(pending) >= workers * _TASKS_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise PreprocessError("a worker process died (out of memory?); try fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)
