"""Whole tensors of a ``torch_dist`` checkpoint, from the chunks that its ranks wrote, as data."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from megatron_exo.checkpoints.reading import DamagedCheckpointError
from megatron_exo.errors import reason
from megatron_exo.plain_pickle import check_saved, check_tensor


def read_tensor(folder: Path, index: Metadata, key: str) -> Tensor:
    """The whole tensor, on the CPU, in memory of its own; at most one chunk is in memory beside it.

    Args:
        folder: ``iter_NNNNNNN``.
        index: of that folder (:func:`~.reading.read_index`).
        key: of a tensor in the index.

    Raises:
        DamagedCheckpointError: its chunks do not make up the tensor, or one cannot be read; names the tensor.
    """
    kind = index.state_dict_metadata[key]
    assert isinstance(kind, TensorStorageMetadata)
    try:
        _check_chunks(kind)
        chunks = [_read_chunk(folder, index, key, chunk) for chunk in kind.chunks[:1]]
        if len(kind.chunks) == 1:
            return chunks[0]
        whole = torch.empty(kind.size, dtype=kind.properties.dtype)
        for chunk in kind.chunks:
            part = chunks.pop() if chunks else _read_chunk(folder, index, key, chunk)
            place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[place] = part
            del part  # before the next is read
        return whole
    except Exception as error:  # damaged bytes raise whatever they like
        raise DamagedCheckpointError(f"{folder}: {key[:80]} cannot be read: {reason(error)}") from error


def _read_chunk(folder: Path, index: Metadata, key: str, chunk: ChunkStorageMetadata) -> Tensor:
    place = index.storage_data[MetadataIndex(key, chunk.offsets)]
    dtype = cast(TensorStorageMetadata, index.state_dict_metadata[key]).properties.dtype
    size = math.prod(chunk.sizes) * dtype.itemsize
    if size > place.length or place.transform_descriptors:
        raise ValueError(f"a chunk of {size} bytes is stored in {place.length}, or in another way than plainly")
    with (folder / place.relative_path).open("rb") as file:
        section = cast(BinaryIO, _Section(file, place.offset, place.length))
        check_saved(section)
        part = torch.load(section, map_location="cpu", weights_only=True)
    if not isinstance(part, Tensor):
        raise ValueError(f"a chunk is a {type(part).__name__}")
    check_tensor(part)
    if part.shape != chunk.sizes or part.dtype != dtype:
        raise ValueError(f"a chunk is {part.dtype} {list(part.shape)}, not as the index says")
    return part


class _Section(io.RawIOBase):
    """A part of a file as a file of its own; reading it copies nothing but what is asked for."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view[:count])  # type: ignore[attr-defined]
        self._position += count
        return count


def _check_chunks(kind: TensorStorageMetadata) -> None:
    """Refuse chunks that leave a part of the tensor out, or say a part twice."""
    boxes = [[(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in kind.chunks]
    if not all(len(box) == len(kind.size) for box in boxes):
        raise ValueError("chunks of another rank than the tensor")
    within = all(0 <= a <= b <= size for box in boxes for (a, b), size in zip(box, kind.size, strict=True))
    covered = sum(math.prod(chunk.sizes) for chunk in kind.chunks)
    overlap = any(
        all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))
        for number, one in enumerate(boxes)
        for other in boxes[:number]
    )
    if not within or overlap or covered != math.prod(kind.size):
        raise ValueError(f"its {len(boxes)} chunks do not make up a tensor of {list(kind.size)}")
