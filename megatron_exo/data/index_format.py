"""The index of a Megatron dataset, ``PREFIX.idx``, and the choice of the type of its tokens.

All little-endian: ``MMIDIDX\\0\\0``, version 1 (u64), dtype code (u8), number of sequences S (u64), length D of the
document table (u64); then S lengths in tokens (i32), S byte offsets into the ``.bin`` (i64), and D sequence numbers at
which documents begin, the last being S (i64).

Megatron's own ``IndexedDatasetBuilder`` keeps all of it in lists until the end, so it can neither go on after a crash
nor hold more documents than memory does. Tests hold this writer to the same bytes.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
TOKEN_DTYPES = {1: "uint8", 2: "int8", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Megatron's dtype codes that can hold token ids (6 and 7 are floating point)."""

_BLOCK = 1 << 20  # entries written together


def token_dtype(vocab_size: int) -> np.dtype:
    """What Megatron stores the ids of a vocabulary in."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def write_index(path: Path, dtype: np.dtype, lengths: NDArray[np.int32]) -> None:
    """Write the index of documents of one sequence each.

    Args:
        dtype: of the tokens.
        lengths: in tokens, int32 [documents]; may be mapped, as it is read in blocks.
    """
    code = next(code for code, name in TOKEN_DTYPES.items() if np.dtype(name) == dtype)
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(lengths) + 1))
        blocks = range(0, len(lengths), _BLOCK)
        for begin in blocks:
            file.write(lengths[begin : begin + _BLOCK].astype("<i4").tobytes())
        offset = 0
        for begin in blocks:
            sizes = lengths[begin : begin + _BLOCK].astype("<i8") * dtype.itemsize
            ends = offset + np.cumsum(sizes)
            file.write((ends - sizes).tobytes())
            offset = int(ends[-1])
        for begin in range(0, len(lengths) + 1, _BLOCK):
            file.write(np.arange(begin, min(begin + _BLOCK, len(lengths) + 1), dtype="<i8").tobytes())
