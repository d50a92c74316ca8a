"""What is plain data is read as the ``pickle`` module reads it, in every protocol and cut off at every place."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import StorageMeta, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_exo.plain_pickle import read_index_pickle

SHAPES = [torch.Size(shape) for shape in ([], [7], [300, 4], [2, 70_000, 3], [1, 2, 3, 1 << 40])]


def an_index(parts: int) -> Metadata:
    """Of a thing of every kind; with more than 256 parts, numbers and references of every width."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {"é" * 300: BytesStorageMetadata()}
    stored: dict[MetadataIndex, _StorageInfo] = {MetadataIndex("é" * 300): _StorageInfo("__0_0.distcp", 0, 1 << 33)}
    for n in range(parts):
        name, shape = f"layers.{n}.weight", SHAPES[n % len(SHAPES)]
        offset = torch.Size([0] * len(shape))
        properties = TensorProperties(dtype=(torch.bfloat16, torch.float32)[n % 2])
        described[name] = TensorStorageMetadata(properties, shape, [ChunkStorageMetadata(offset, shape)] * (1 + n % 3))
        stored[MetadataIndex(name, offset, n)] = _StorageInfo(f"__{n}_0.distcp", n << 8, n)
    planned = {"steps": ("optimizer", 0, -5, 0.25, True, False, None, [1], [1, "two"], (), (1, 2, 3), (1, 2, 3, 4))}
    return Metadata(described, planned, stored, StorageMeta(Path("runs") / "iter_0000004", "save", "load"))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_an_index_is_read_as_pickle_reads_it(protocol: int) -> None:
    index = an_index(600)
    assert read_index_pickle(pickle.dumps(index, protocol)) == index
    assert gc.isenabled()


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_index_cut_off_anywhere_is_refused(protocol: int) -> None:
    data = pickle.dumps(an_index(2), protocol)
    for end in range(len(data)):
        with pytest.raises((EOFError, pickle.UnpicklingError, ValueError)):
            read_index_pickle(data[:end])
    assert gc.isenabled()
