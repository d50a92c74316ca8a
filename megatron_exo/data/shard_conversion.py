"""Shards of GPT-2 tokens as one Megatron dataset: every token once, in the order of the stream.

The shards are pieces of one stream, cut at a number of tokens: a document may go on in the next shard. There each
document begins with the separator, in Megatron's data it ends with it. So a document here is what follows a separator,
up to and including the next one; the separator that opens the stream stays at the head of the first document, and the
last document ends where the stream does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_exo.data.progress import Progress
from megatron_exo.data.shard_format import HEADER_BYTES, TOKEN_BYTES, ShardError, count_tokens
from megatron_exo.data.sidecar import Sidecar
from megatron_exo.data.tokenizers import TokenizerError, TokenizerSpec, describe
from megatron_exo.data.unfinished import describe_file, unfinished_dataset

SEPARATOR = 50256
VOCAB_SIZE = 50257

_UNNAMED: dict[str, Any] = {
    "tokenizer_type": "GPT2BPETokenizer",
    "tokenizer_model": None,
    "tokenizer_sha256": None,
    "tokenizer_fingerprint": None,
}
_DTYPE = np.dtype("<u2")
_BLOCK = 1 << 22  # tokens read together


def convert_shards(
    shards: Sequence[str], prefix: str, tokenizer_spec: TokenizerSpec | None = None, *, overwrite: bool = False
) -> Sidecar:
    """Write ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.json``; ``PREFIX`` is the ``--data-path``.

    A start after a crash goes on where the unfinished files stand.

    Args:
        shards: files, in the order of the stream.
        tokenizer_spec: GPT-2's tokenizer, recorded so that a run with another one is refused. Without it a run is only
            held to the size of the vocabulary.
        overwrite: replace an existing dataset.

    Raises:
        ShardError: no shards, one twice, one that is not whole, or a token that GPT-2 does not have.
        TokenizerError: the tokenizer cannot be read, or is not of GPT-2's size.
        UnfinishedError: something is in the way of the output.
    """
    paths = [Path(name) for name in shards]
    counts = _check(paths)
    made_with = _UNNAMED if tokenizer_spec is None else _describe(tokenizer_spec)
    request = {"made of": "token shards", "inputs": [describe_file(path) for path in paths], **made_with}
    with unfinished_dataset(prefix, _DTYPE, request, overwrite=overwrite) as dataset:
        if not dataset.complete:
            unended = dataset.position["unended"] if dataset.position else 0
            progress = Progress("convert", TOKEN_BYTES * sum(counts), TOKEN_BYTES * dataset.tokens)
            begun_at, documents_before = dataset.tokens, dataset.documents
            for tokens in _blocks(paths, counts, begun_at):
                lengths, unended = _documents(tokens, unended, opens_stream=dataset.tokens == 0)
                dataset.append(tokens, lengths)
                dataset.mark({"unended": unended})
                written = TOKEN_BYTES * (dataset.tokens - begun_at)
                progress.update(dataset.documents - documents_before, written, TOKEN_BYTES * dataset.tokens)
            if unended:
                dataset.append(np.zeros(0, _DTYPE), np.array([unended]))
                dataset.mark({"unended": 0})
            progress.finish(dataset.documents - documents_before, TOKEN_BYTES * (dataset.tokens - begun_at))
            if dataset.tokens != sum(counts):
                raise ShardError(f"{dataset.tokens} tokens were written, the headers count {sum(counts)}; begin anew")
            dataset.finish(
                Sidecar(
                    **made_with,
                    vocab_size=VOCAB_SIZE,
                    eod=SEPARATOR,
                    append_eod=True,
                    dtype=_DTYPE.name,
                    documents=dataset.documents,
                    tokens=dataset.tokens,
                    empty_documents=0,
                    inputs=[path.name for path in paths],
                )
            )
        return dataset.publish(prefix)


def _check(paths: Sequence[Path]) -> list[int]:
    """The number of tokens of every shard; all of them are looked at before anything is written."""
    if not paths:
        raise ShardError("no shards are given; --input takes shards such as finewebedu_train_*.bin")
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise ShardError(f"{path} is given twice; name every shard once")
        seen.add(path.resolve())
    return [count_tokens(path) for path in paths]


def _describe(spec: TokenizerSpec) -> dict[str, Any]:
    tokenizer = spec.load()
    if (tokenizer.vocab_size, tokenizer.eod) != (VOCAB_SIZE, SEPARATOR):
        raise TokenizerError(
            f"{spec.model} has {tokenizer.vocab_size} tokens and the separator {tokenizer.eod}; shards have those of "
            f"GPT-2, {VOCAB_SIZE} and the separator {SEPARATOR}: pass GPT-2's tokenizer, or none"
        )
    return describe(spec, tokenizer)


def _blocks(paths: Sequence[Path], counts: Sequence[int], skip: int) -> Iterator[NDArray[np.uint16]]:
    """The tokens of the stream after the first ``skip``, in blocks, uint16 [n]; a block is valid until the next."""
    buffer = np.empty(_BLOCK, _DTYPE)
    for path, count in zip(paths, counts, strict=True):
        if skip >= count:
            skip -= count
            continue
        with path.open("rb") as file:
            file.seek(HEADER_BYTES + TOKEN_BYTES * skip)
            for begin in range(skip, count, _BLOCK):
                block = buffer[: min(_BLOCK, count - begin)]
                if file.readinto(block) != block.nbytes:
                    raise ShardError(f"{path}: the file has become shorter while it was read; download it again")
                if (largest := int(block.max())) >= VOCAB_SIZE:
                    raise ShardError(
                        f"{path}: token {largest} at position {begin + int(block.argmax())} is outside GPT-2's "
                        f"vocabulary of {VOCAB_SIZE}; the shard is damaged or holds another tokenizer's tokens"
                    )
                yield block
        skip = 0


def _documents(tokens: NDArray[np.uint16], unended: int, *, opens_stream: bool) -> tuple[NDArray[np.int64], int]:
    """The lengths of the documents that end in a block, and how many tokens the unfinished one has after it.

    Args:
        unended: tokens of the document before the block.
        opens_stream: its first token ends no document, even if it is a separator.
    """
    ends = np.flatnonzero(tokens == SEPARATOR) + 1
    if opens_stream and len(ends) and ends[0] == 1:
        ends = ends[1:]
    lengths = np.diff(ends, prepend=-unended)
    return lengths, len(tokens) - int(ends[-1]) if len(ends) else unended + len(tokens)
