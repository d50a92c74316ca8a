"""Tokenise documents into a Megatron dataset, with several processes and bounded memory.

The result depends on the inputs and the tokenizer alone: documents keep their order whatever the number of workers, and
however often the work was killed and begun again, which goes on where it stood. Files appear under their final names
only when they are complete and have passed validation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_exo.data.index_format import token_dtype
from megatron_exo.data.progress import Progress
from megatron_exo.data.readers import Document, DocumentReader, Position, StreamError
from megatron_exo.data.sidecar import Sidecar
from megatron_exo.data.tokenizers import Tokenizer, TokenizerError, TokenizerSpec, describe
from megatron_exo.data.unfinished import UnfinishedDataset, describe_file, unfinished_dataset
from megatron_exo.errors import UserError

_BATCH_BYTES = 1 << 20  # of text per task: large against the cost of handing it over, small against memory
_BATCH_DOCUMENTS = 512
_TASKS_PER_WORKER = 4
_EMPTY_SHOWN = 5


class PreprocessError(UserError):
    """A request that cannot be carried out: what, why, what instead."""


class WorkersDiedError(PreprocessError):
    """The work can go on where it stands."""


@dataclass(frozen=True)
class PreprocessResult:
    """What was written, and the documents without text that were left out."""

    sidecar: Sidecar
    empty: list[str]
    """The first few of them: ``document 17 (corpus.jsonl:18)``."""


@dataclass(frozen=True)
class _Batch:
    """Documents that are tokenised together, and the reader's position behind them."""

    documents: list[Document]
    position: Position


@dataclass(frozen=True)
class _Encoded:
    """A tokenised batch: all ids one after the other, and the length of each document (0: without text)."""

    ids: NDArray
    lengths: list[int]
    sources: list[str]
    text_bytes: int
    position: Position


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

    Until they are whole they are in the folder ``PREFIX.partial``, with which the next call with the same arguments
    goes on if this one is killed, or a dataset cannot be streamed any further. ``workers`` may be others.

    Args:
        inputs, json_key, text_split: see :class:`megatron_exo.data.readers.DocumentReader`.
        append_eod: end every document with the tokenizer's end-of-document id.
        skip_empty: leave out documents without text (whitespace only) and report them, instead of failing.
        workers: number of processes; 1 tokenises in this one.
        overwrite: replace an existing dataset.

    Raises:
        InputError, TokenizerError: for what cannot be read.
        UnfinishedError: if the output exists, or something else is in its way.
        PreprocessError: if no document holds text, or ``skip_empty`` is false and one does not.
    """
    tokenizer = tokenizer_spec.load()
    if append_eod and tokenizer.eod is None:
        raise TokenizerError(
            f"{tokenizer_spec.model} names no end-of-sequence token to separate documents with; add eos_token to its "
            "tokenizer_config.json, or pass --no-append-eod"
        )
    reader = DocumentReader(inputs, json_key, text_split)
    dtype = token_dtype(tokenizer.vocab_size)
    made_with = describe(tokenizer_spec, tokenizer)
    request = {
        "made of": "texts",
        # A Hugging Face dataset says itself whether it is the same when it is opened again.
        "inputs": [item if isinstance(item, str) else describe_file(item) for item in reader.inputs],
        "json_key": json_key,
        "text_split": text_split,
        "append_eod": append_eod,
        "skip_empty": skip_empty,
        **made_with,
    }
    lasting = (StreamError, WorkersDiedError)
    with unfinished_dataset(prefix, dtype, request, overwrite=overwrite, lasting=lasting) as dataset:
        so_far = _SoFar.load(dataset.position)
        if not dataset.complete:
            reader = DocumentReader(inputs, json_key, text_split, so_far.reader)
            encode = functools.partial(_encode, dtype=dtype.name, eod=tokenizer.eod if append_eod else None)
            batches = _ordered_map(encode, _batches(reader), tokenizer, tokenizer_spec, workers)
            with contextlib.closing(batches):
                so_far = _write(dataset, batches, so_far, reader, skip_empty)
            if dataset.documents == 0:
                raise PreprocessError(f"no document with text in {', '.join(inputs)}; nothing is written")
            dataset.finish(
                Sidecar(
                    **made_with,
                    vocab_size=tokenizer.vocab_size,
                    eod=tokenizer.eod,
                    append_eod=append_eod,
                    dtype=dtype.name,
                    documents=dataset.documents,
                    tokens=dataset.tokens,
                    empty_documents=so_far.empty,
                    inputs=[name if name.startswith("hf:") else Path(name).name for name in inputs],
                )
            )
        return PreprocessResult(dataset.publish(prefix), so_far.empty_shown)


# -- writing ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SoFar:
    """How far the work has come, beside what :class:`UnfinishedDataset` counts itself."""

    reader: Position = dataclasses.field(default_factory=Position)
    empty: int = 0
    empty_shown: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def load(cls, position: dict[str, Any] | None) -> _SoFar:
        return cls() if position is None else cls(**position | {"reader": Position(**position["reader"])})


def _write(
    dataset: UnfinishedDataset, batches: Iterator[_Encoded], so_far: _SoFar, reader: DocumentReader, skip_empty: bool
) -> _SoFar:
    progress = Progress("tokenise", reader.total_bytes, so_far.reader.bytes_read)
    documents, text_bytes = 0, 0
    for batch in batches:
        lengths = np.array(batch.lengths)
        empty = np.flatnonzero(lengths == 0)
        first = dataset.documents + so_far.empty
        shown = [f"document {first + index} ({batch.sources[index]})" for index in empty[:_EMPTY_SHOWN]]
        if shown and not skip_empty:
            raise PreprocessError(f"{shown[0]} is empty; remove it, or pass --empty-documents skip")
        dataset.append(batch.ids, lengths[lengths > 0])
        so_far = _SoFar(batch.position, so_far.empty + len(empty), (so_far.empty_shown + shown)[:_EMPTY_SHOWN])
        dataset.mark(dataclasses.asdict(so_far))
        documents += len(lengths) - len(empty)
        text_bytes += batch.text_bytes
        progress.update(documents, text_bytes, reader.bytes_read)
    progress.finish(documents, text_bytes)
    return so_far


# -- tokenising ---------------------------------------------------------------------------------------------


def _batches(reader: DocumentReader) -> Iterator[_Batch]:
    batch: list[Document] = []
    size = 0
    for document in reader:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
            yield _Batch(batch, reader.position)
            batch, size = [], 0
    if batch:
        yield _Batch(batch, reader.position)


def _encode(batch: _Batch, tokenizer: Tokenizer, dtype: str, eod: int | None) -> _Encoded:
    documents = batch.documents
    pieces = tokenizer.encode_batch([document.text if document.text.strip() else "" for document in documents])
    if eod is not None:
        pieces = [[*ids, eod] if ids else ids for ids in pieces]
    return _Encoded(
        ids=np.array([index for ids in pieces for index in ids], dtype=dtype),
        lengths=[len(ids) for ids in pieces],
        sources=[document.source for document in documents],
        text_bytes=sum(len(document.text.encode()) for document in documents),
        position=batch.position,
    )


_worker_tokenizer: Tokenizer


def _start_worker(spec: TokenizerSpec) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which then ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    global _worker_tokenizer
    _worker_tokenizer = spec.load()


def _end_with_parent() -> None:
    """A worker of a pool waits for ever if the main process is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(encode: Callable[..., _Encoded], batch: _Batch) -> _Encoded:
    return encode(batch, tokenizer=_worker_tokenizer)


def _ordered_map(
    encode: Callable[..., _Encoded],
    batches: Iterator[_Batch],
    tokenizer: Tokenizer,
    spec: TokenizerSpec,
    workers: int,
) -> Generator[_Encoded]:
    """Encode batches in order, with at most a few per worker in flight, so that memory stays bounded."""
    if workers <= 1:
        yield from (encode(batch, tokenizer=tokenizer) for batch in batches)
        return
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(spec,)
    )
    pending: deque[Future[_Encoded]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_encode_in_worker, encode, batch))
            if len(pending) >= workers * _TASKS_PER_WORKER:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        raise WorkersDiedError(
            "a worker process died (out of memory?); try fewer --workers: the same command goes on where it stands"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
