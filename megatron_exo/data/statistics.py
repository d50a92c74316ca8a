"""What can be said of a dataset without a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_exo.data.validate import check_dataset

_BLOCK = 1 << 22  # tokens counted together


def unigram_entropy(prefix: str | Path) -> float:
    """The entropy of the token frequencies of a dataset, in nats per token.

    It is the loss of the best model that knows how often each token occurs and nothing of its context, so a model
    that has learned anything from context is below it.

    Raises:
        DatasetError: as :func:`~megatron_exo.data.validate.check_dataset`.
    """
    report = check_dataset(prefix)
    tokens = np.memmap(f"{prefix}.bin", dtype=report.dtype, mode="r")
    counts = np.zeros(0, dtype=np.int64)
    for begin in range(0, len(tokens), _BLOCK):
        block = np.bincount(tokens[begin : begin + _BLOCK], minlength=len(counts))
        block[: len(counts)] += counts
        counts = block
    frequencies = counts[counts > 0] / len(tokens)
    return float(-(frequencies * np.log(frequencies)).sum())
