"""Checkpoints of the distributed optimizer that any layout can load, saved without mixing parameters up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core

_AFFECTED = "0.19.2"
"""The release of megatron-core that has the defect; pull request 5077 of Megatron-LM mends it."""


def index_without_padding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DistributedOptimizer.sharded_param_state_fully_reshardable``: look parameters up where they are.

    The original gathers the main parameters and moments of a buffer without the padding between its buckets, and then
    cuts parameters out of that by the index of the padded buffer: from the second bucket on by that of a neighbour.
    Other releases are left alone: mended twice, the index would be wrong again.
    """
    if megatron.core.__version__.split("+")[0] != _AFFECTED:
        return original

    @functools.wraps(original)
    def sharded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _padding_left_out(self.buffers):
            return original(self, *args, **kwargs)

    return sharded


@contextmanager
def _padding_left_out(buffers: list[Any]) -> Iterator[None]:
    """Let every buffer's index of parameters, start and end in elements, not count the padding between buckets."""
    padded = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        shifts, unpadded = [], 0
        for bucket in buffer.buckets:
            shifts.append(unpadded - bucket.offset)
            unpadded += bucket.numel_unpadded
        buffer.param_index_map = {
            param: (start + shifts[bucket_id], end + shifts[bucket_id], bucket_id)
            for param, (start, end, bucket_id) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, index in zip(buffers, padded, strict=True):
            buffer.param_index_map = index
