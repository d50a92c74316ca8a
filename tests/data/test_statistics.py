"""Claims about dataset statistics."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_exo.data import statistics


def _write(prefix: Path, documents: list[list[int]]) -> Path:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(np.array(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def test_unigram_entropy_of_equally_frequent_tokens_is_the_log_of_their_number(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "even", [[7, 1000], [5, 3]])
    assert statistics.unigram_entropy(prefix) == pytest.approx(math.log(4))


def test_unigram_entropy_is_the_same_in_blocks_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = _write(tmp_path / "uneven", [[1, 1, 1], [1, 2, 900]])
    expected = -(4 / 6 * math.log(4 / 6) + 2 / 6 * math.log(1 / 6))
    for block in (1, 4, 6, 100):
        monkeypatch.setattr(statistics, "_BLOCK", block)
        assert statistics.unigram_entropy(prefix) == pytest.approx(expected)
