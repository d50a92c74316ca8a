"""Attention once more, written down: what masked documents are held against."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of [queries, ..., d] to [keys, ..., d], aligned at the end, without grouped queries."""
    scores = torch.einsum("q...d,k...d->...qk", query, key) / math.sqrt(query.shape[-1])
    queries, keys = scores.shape[-2:]
    future = torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    return torch.einsum("...qk,k...d->q...d", scores.masked_fill(future, -torch.inf).softmax(-1), value)


def attend_packed(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor) -> Tensor:
    """:func:`attend` of each sequence to its own keys, sequences end to end: [tokens, heads, d] (THD)."""
    queries, keys = (part.diff().tolist() for part in (cu_seqlens_q, cu_seqlens_kv))
    sequences = zip(query.split(queries), key.split(keys), value.split(keys), strict=True)
    return torch.cat([attend(*sequence) for sequence in sequences])
