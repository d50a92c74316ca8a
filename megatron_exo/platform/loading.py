"""Checkpoints loaded as data. Used only through :mod:`megatron_exo.platform.patches`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megatron_exo.plain_pickle import read_index_pickle


def read_index_as_data(original: Callable[..., Metadata]) -> Callable[..., Metadata]:
    """In the place of ``FileSystemReader.read_metadata``, which unpickles ``.metadata`` without restriction."""

    @functools.wraps(original)
    def read_metadata(self: Any, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            index = read_index_pickle(file.read())
        if (meta := getattr(index, "storage_meta", None)) is None:  # there is no field in what older versions wrote
            meta = index.storage_meta = StorageMeta()
        meta.load_id = self.load_id
        return index

    return read_metadata
