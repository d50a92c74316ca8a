"""The loss on a dataset, document by document: no document sees another, and every token counts once.

A document is read after the token that ends the one before it, as in training, so its first token is predicted too,
and so is the one that ends it. What is longer than the model's context is read in windows, the last of which begins
early enough to be full, as lm-evaluation-harness reads texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDataset
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from megatron_exo import platform
from megatron_exo.data.validate import check_dataset
from megatron_exo.errors import UserError
from megatron_exo.evaluation.subjects import Subject

_SORTED_TOGETHER = 64
"""Batches that are sorted by length together, so that little of a batch is padding."""


@dataclass(frozen=True)
class Window:
    """Tokens of one document that the model reads at once, int64 [n], and the n that follow each, int64 [n]; the last
    ``new`` of these count, those before have counted already."""

    document: int
    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    new: int


@dataclass(frozen=True)
class DatasetScore:
    """The loss on a dataset.

    Args:
        prefix: of the dataset.
        losses: nats of each document, summed over its tokens, float64 [documents].
        counts: predicted tokens of each document, int64 [documents].
    """

    prefix: str
    losses: NDArray[np.float64]
    counts: NDArray[np.int64]

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def loss(self) -> float:
        """Nats per token; every token weighs the same."""
        return float(self.losses.sum() / self.tokens)

    @property
    def stderr(self) -> float | None:
        """Standard error of :attr:`loss` over documents, whose tokens are not independent; ``None`` for a single one.

        A ratio of two sums over documents, by the delta method.
        """
        n = len(self.counts)
        if n < 2:
            return None
        residuals = self.losses - self.loss * self.counts
        return float(math.sqrt((residuals**2).sum() * n / (n - 1)) / self.tokens)

    def as_json(self) -> dict[str, Any]:
        return {
            "documents": len(self.counts),
            "tokens": self.tokens,
            "loss": self.loss,
            "loss_stderr": self.stderr,
            "perplexity": math.exp(self.loss),
            "items": [
                {"document": number, "tokens": int(count), "loss_sum": float(loss)}
                for number, (loss, count) in enumerate(zip(self.losses, self.counts, strict=True))
            ],
        }


def score_dataset(subject: Subject, prefix: str, *, batch_size: int, limit: int | None = None) -> DatasetScore:
    """The loss of a model on a Megatron dataset; the same on every rank, whatever the batch and the layout.

    Args:
        prefix: of the ``.bin``/``.idx`` pair.
        batch_size: windows that are computed together.
        limit: only so many documents, from the first.

    Raises:
        DatasetError: the dataset is missing or damaged, or another tokenizer made it.
        UserError: it has no document, or none of them has two tokens and the model no token that begins one.
    """
    check_dataset(prefix, vocab_size=subject.vocab_size, scan_tokens=True)
    subject.check_dataset_tokenizer(prefix)
    documents = list(_documents(prefix, subject.eod, limit))
    size = 1 if subject.replicas is None else subject.replicas.size()
    mine = ((number, documents[number]) for number in range(subject.replica, len(documents), size))
    windows = (window for number, tokens in mine for window in _windows(number, tokens, subject))
    total = sum(map(len, documents)) // size
    progress = tqdm(desc=prefix, total=total, unit="token", unit_scale=True, disable=not subject.is_speaker)

    losses, counts = torch.zeros(len(documents), dtype=torch.float64), torch.zeros(len(documents), dtype=torch.int64)
    with progress:
        for near in batched(windows, batch_size * _SORTED_TOGETHER):
            by_length = sorted(near, key=lambda window: len(window.tokens), reverse=True)
            for batch in batched(by_length, batch_size):
                for window, loss in zip(batch, _losses_of(subject, batch), strict=True):
                    losses[window.document] += loss
                    counts[window.document] += window.new
                    progress.update(window.new)
    losses, counts = (_sum_of_replicas(subject, part) for part in (losses, counts))
    if not counts.any():
        raise UserError(f"dataset {prefix} has no token to predict; give one with documents of two tokens or more")
    return DatasetScore(prefix, losses.numpy(), counts.numpy())


def _sum_of_replicas(subject: Subject, part: Tensor) -> Tensor:
    """Each replica knows the documents that it has read, and zeros."""
    if subject.replicas is None:
        return part
    part = part.to(platform.device())
    dist.all_reduce(part, group=subject.replicas)
    return part.cpu()


def _documents(prefix: str, eod: int | None, limit: int | None) -> Iterator[NDArray[np.integer]]:
    """The tokens of each document; a sequence in which several are separated by ``eod`` is several documents."""
    dataset = IndexedDataset(prefix, mmap=True)
    bounds = dataset.document_indices
    found = 0
    for first, end in pairwise(bounds):
        parts = [dataset[number] for number in range(int(first), int(end))]
        tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        cuts = [] if eod is None else (np.flatnonzero(tokens == eod) + 1).tolist()
        for document in np.split(tokens, cuts):
            if len(document):
                if found == limit:
                    return
                found += 1
                yield document


def _windows(number: int, tokens: NDArray[np.integer], subject: Subject) -> Iterator[Window]:
    before = [] if subject.eod is None else [subject.eod]
    text = np.concatenate([np.array(before, dtype=np.int64), tokens.astype(np.int64)])
    for start in range(0, len(text) - 1, subject.longest):
        end = min(start + subject.longest + 1, len(text))
        part = text[max(0, end - subject.longest - 1) : end]
        yield Window(number, part[:-1], part[1:], new=end - start - 1)


def _losses_of(subject: Subject, batch: Sequence[Window]) -> list[float]:
    """Nats of each window's new tokens, summed in float64; shorter ones are padded, which no earlier token sees."""
    longest = len(batch[0].tokens)
    tokens = torch.zeros(len(batch), longest, dtype=torch.int64)
    labels = torch.zeros_like(tokens)
    for row, window in enumerate(batch):
        tokens[row, : len(window.tokens)] = torch.from_numpy(window.tokens)
        labels[row, : len(window.labels)] = torch.from_numpy(window.labels)
    device = platform.device()
    losses: Tensor = subject.token_losses(tokens.to(device), labels.to(device)).double().cpu()
    ends = [len(window.labels) for window in batch]
    return [float(row[end - w.new : end].sum()) for row, end, w in zip(losses, ends, batch, strict=True)]
