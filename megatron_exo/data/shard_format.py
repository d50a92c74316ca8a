"""The public shards of GPT-2 tokens: a header of 256 int32 (magic, version, count of tokens), then uint16 tokens.

All little-endian. So ``llm.c`` and ``modded-nanogpt`` lay out their ``.bin`` files, and so FineWeb-Edu is published in
GPT-2's tokens. A loader that takes the whole file for tokens reads the header as 512 of them.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from megatron_exo.errors import UserError

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024
TOKEN_BYTES = 2

_FIELDS = struct.Struct("<iii")  # magic, version, count; the rest of the header is zero


class ShardError(UserError):
    """A file that is no whole shard, or a list of shards that no dataset can be made of: which, why, what to do."""


def is_token_shard(path: str) -> bool:
    """Whether a file begins as a shard does."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == struct.pack("<i", MAGIC)


def count_tokens(path: Path) -> int:
    """The number of tokens of a shard, as its header has it.

    Raises:
        ShardError: there is no such file, it is not a shard of this layout, or its size is not what its count takes.
    """
    if not path.is_file():
        raise ShardError(f"{path}: no such file; --input takes shards such as finewebedu_train_*.bin")
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise ShardError(
            f"{path}: not a token shard, or cut off: it has {size} bytes, the header alone takes {HEADER_BYTES}"
        )
    magic, version, count = _FIELDS.unpack_from(header)
    if magic != MAGIC:
        raise ShardError(f"{path}: not a shard of GPT-2 tokens: it begins with {magic} instead of {MAGIC}")
    if version != VERSION:
        raise ShardError(f"{path}: version {version} of the layout of shards is unknown; this program reads {VERSION}")
    if count <= 0:
        raise ShardError(f"{path}: the header counts {count} tokens; leave the shard out, or get it again")
    expected = HEADER_BYTES + TOKEN_BYTES * count
    if size != expected:
        state = "cut off" if size < expected else "too long"
        raise ShardError(
            f"{path}: the file is {state}: it has {size} bytes, its header counts {count} tokens, which take "
            f"{expected}; download it again"
        )
    return count
