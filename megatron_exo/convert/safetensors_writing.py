"""Writes the weights of a model into the files of a Hugging Face folder, with memory for one tensor group at a time.

The safetensors library takes a file as a whole. Its format is a JSON header and then the bytes of the tensors, so with
shapes known in advance each group goes to the file as soon as it has been read.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megatron_exo.convert.mapping import ConversionError, ParameterMapping

INDEX = "model.safetensors.index.json"
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Of safetensors; a model has no others."""
_BLOCK = 1 << 22
"""Elements that are cast and written at once."""


@dataclass(frozen=True)
class Group:
    """The tensors of one row of the table: read together, and kept in one file."""

    row: ParameterMapping
    dtype: torch.dtype
    """In the file."""

    def nbytes(self) -> int:
        return sum(map(math.prod, self.row.their_shapes())) * self.dtype.itemsize


def plan_shards(groups: Iterable[Group], limit: int) -> list[list[Group]]:
    """Fill files in order up to ``limit`` bytes of tensors each; a larger group gets a file of its own."""
    shards: list[list[Group]] = []
    filled = 0
    # Wider dtypes first: then every tensor begins at a multiple of its width.
    for group in sorted(groups, key=lambda group: -group.dtype.itemsize):
        if not shards or filled + group.nbytes() > limit:
            shards.append([])
            filled = 0
        shards[-1].append(group)
        filled += group.nbytes()
    return shards


def shard_name(number: int, count: int) -> str:
    """Of the shard ``number``, counted from 0, as transformers names them."""
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, shards: Sequence[Sequence[Group]]) -> None:
    """Write the file that says in which file each tensor is."""
    weight_map = {
        name: shard_name(number, len(shards))
        for number, shard in enumerate(shards)
        for group in shard
        for name in group.row.their_names
    }
    total = sum(group.nbytes() for shard in shards for group in shard)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_shard(path: Path, groups: Sequence[Group], read: Callable[[str], Tensor], progress: Progress) -> str:
    """Write one file and see it on the disk.

    Args:
        read: name of ours → the whole tensor, without padding.

    Returns:
        The SHA-256 of the file.

    Raises:
        ConversionError: a tensor that does not fit the table, or cannot be held by the file's dtype; named.
    """
    header = json.dumps({"__metadata__": {"format": "pt"}, **dict(_entries(groups))}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        _write(file, digest, len(header).to_bytes(8, "little") + header)
        for group in groups:
            for name, tensor in _converted(group.row, read):
                for block in tensor.reshape(-1).split(_BLOCK):
                    _write(file, digest, _bytes(name, block, group.dtype))
                    progress.add(block.numel() * group.dtype.itemsize)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _entries(groups: Sequence[Group]) -> Iterator[tuple[str, dict[str, Any]]]:
    start = 0
    for group in groups:
        for name, shape in zip(group.row.their_names, group.row.their_shapes(), strict=True):
            end = start + math.prod(shape) * group.dtype.itemsize
            yield name, {"dtype": DTYPE_NAMES[group.dtype], "shape": list(shape), "data_offsets": [start, end]}
            start = end


def _converted(row: ParameterMapping, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Their tensors from ours; what is ours is given back when the caller is done with them."""
    ours = read(row.ours)
    if tuple(ours.shape) != row.our_shape():
        raise ConversionError(f"{row.ours} has shape {list(ours.shape)}, expected {list(row.our_shape())}")
    yield from zip(row.their_names, row.to_theirs(ours), strict=True)


def _bytes(name: str, block: Tensor, dtype: torch.dtype) -> memoryview:
    cast = block.to(dtype)
    if dtype is torch.float16 and bool((cast.isinf() & block.isfinite()).any()):
        raise ConversionError(f"{name} has values beyond 65504, the largest of fp16; convert with --dtype bf16 or fp32")
    return memoryview(cast.contiguous().view(torch.uint8).numpy())


def _write(file: BinaryIO, digest: Any, content: bytes | memoryview) -> None:
    file.write(content)
    digest.update(content)


class Progress:
    """A line on standard error: how much, how fast, how long still.

    On a terminal one line is rewritten twice a second; elsewhere (a log) a line is added every ten seconds.
    """

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._terminal = sys.stderr.isatty()
        self._start = self._last = time.monotonic()

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if now - self._last >= (0.5 if self._terminal else 10.0):
            self._last = now
            self._print(now, "" if self._terminal else "\n")

    def finish(self) -> None:
        if self._terminal and self._last > self._start:
            self._print(time.monotonic(), "\n")

    def _print(self, now: float, end: str) -> None:
        rate = self._done / max(now - self._start, 1e-3)
        left = (self._total - self._done) / max(rate, 1.0)
        amount = f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB"
        line = f"{self._label}: {amount}, {rate / 1e6:.0f} MB/s, {left:.0f} s left"
        print(f"\r{line:<78}" if self._terminal else line, end=end, file=sys.stderr, flush=True)
