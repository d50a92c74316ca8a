"""Documents that share a row and are masked from each other: where they begin, and what each attends to.

A document begins **at** the token that separates documents, the tokenizer's end of text. So the token that ends one
document begins the next: it sees nothing of what was before it, and the first word of every document is predicted from
it alone. This reads rows that are cut out of a stream in the same way whether the separator was written in front of
each document (as in the public GPT-2 shards of FineWeb) or behind it (as Megatron's preprocessing does).

Activations stay [s, b, ·] in every layer, with masking and without. Only the core attention knows of documents: it lays
the rows of a micro-batch end to end and attends to each document by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

DOCUMENTS = ("joined", "masked", "restarted")
"""What documents of one row are to each other: one text; masked from each other, with positions that run on over the
row; or masked, with positions that start from 0 in each."""


@dataclass(frozen=True)
class DocumentMask:
    """How rows are cut into documents.

    Args:
        separator: the token at which a document begins.
        restarts: whether positions start from 0 in each document. Rotary positions act by their differences alone, so
            results agree but for rounding.
    """

    separator: int
    restarts: bool = False

    def boundaries(self, tokens: Tensor) -> Tensor:
        """Where documents begin, as Megatron's datasets say it (``cu_seqlens``).

        Args:
            tokens: int64 [b, s].

        Returns:
            int32 [b, s + 1]: 0, the first position of every further document, and s until the row is full.
        """
        length = tokens.shape[1]
        begins = tokens == self.separator
        begins[:, 0] = True
        positions = torch.arange(length, device=tokens.device, dtype=torch.int32)
        return F.pad(positions.where(begins, length).sort(dim=1).values, (0, 1), value=length)

    def documents(self, boundaries: Tensor, cp_group: dist.ProcessGroup, device: torch.device) -> Documents:
        """What this rank attends to on ``device``; reads ``boundaries``, so waits for a device that they are on."""
        rows = [list(dict.fromkeys(row)) for row in boundaries.tolist()]
        return Documents.of_rows(rows, cp_group.size(), cp_group.rank(), restarts=self.restarts, device=device)

    def of(self, tokens: Tensor, cp_group: dist.ProcessGroup) -> Documents:
        """What this rank attends to, of whole rows of tokens, int64 [b, s]."""
        return self.documents(self.boundaries(tokens), cp_group, tokens.device)


@dataclass
class Documents(PackedSeqParams):
    """The documents of a micro-batch, as far as this rank's queries belong to them.

    Megatron hands it from the model to every core attention, as it does with parameters of packed sequences. It leaves
    rotary embeddings and shapes alone, since ``qkv_format`` is not ``thd`` here.

    Queries are taken row by row, and within a row in this rank's order. They are consecutive *segments*, each of one
    document; its keys go from the document's beginning to the segment's last query, so that causal attention is aligned
    at the end. Without context parallelism, a segment is a whole document and has as many keys as queries.
    """

    num_queries: tuple[int, ...] = ()
    """Of each segment."""
    num_keys: tuple[int, ...] = ()
    """Of each segment."""
    num_rows: int = 1
    key_ranges: tuple[tuple[int, int, int], ...] | None = None
    """Row, begin and end of the keys that segments take one after another; ``None`` for all of them."""
    restarts: bool = False
    device: torch.device | None = None

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int]], cp_size: int = 1, cp_rank: int = 0, **fields: Any) -> Documents:
        """From the boundaries of each row: 0, where further documents begin, and the length of the row.

        Megatron gives a context-parallel rank r the chunks r and 2·cp-1-r of 2·cp.
        """
        length = rows[0][-1]
        numbers = (cp_rank, 2 * cp_size - 1 - cp_rank) if cp_size > 1 else (0,)
        chunk = length // (2 * cp_size if cp_size > 1 else 1)
        num_queries, num_keys, key_ranges = [], [], []
        for row, boundaries in enumerate(rows):
            for begin, end in ((number * chunk, (number + 1) * chunk) for number in numbers):
                here = [(first, last) for first, last in pairwise(boundaries) if first < end and last > begin]
                key_ranges.append((row, here[0][0], end))
                for first, last in here:
                    num_queries.append(min(last, end) - max(first, begin))
                    num_keys.append(min(last, end) - first)
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=length,  # for which Megatron makes the rotary embedding, before it cuts it for this rank
            max_seqlen_kv=length,
            num_queries=tuple(num_queries),
            num_keys=tuple(num_keys),
            num_rows=len(rows),
            key_ranges=tuple(key_ranges) if cp_size > 1 else None,
            **fields,
        )

    def queries_end_to_end(self, part: Tensor) -> Tensor:
        """[s / cp, b, ...] → [b·s / cp, ...]: segment after segment."""
        return part.transpose(0, 1).flatten(0, 1)

    def keys_end_to_end(self, part: Tensor) -> Tensor:
        """The keys or values of each segment after those of the one before, [keys, ...], of whole rows [s, b, ...]."""
        if self.key_ranges is None:
            return part.transpose(0, 1).flatten(0, 1)
        return torch.cat([part[begin:end, row] for row, begin, end in self.key_ranges])

    def in_rows(self, part: Tensor) -> Tensor:
        """The inverse of :meth:`queries_end_to_end`."""
        return part.unflatten(0, (self.num_rows, -1)).transpose(0, 1).contiguous()

    def split(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Segments that attend to themselves alone; those of equal lengths come together.

        Args:
            query: [s / cp, b, ...].
            key, value: of whole rows, [s, b, ...].

        Returns:
            For each pair of lengths: queries [queries, segments, ...], keys and values [keys, segments, ...].
        """
        parts = [self.queries_end_to_end(query), self.keys_end_to_end(key), self.keys_end_to_end(value)]
        if len(self._batches) > 1:
            parts = [part.index_select(0, self._orders[which]) for part, which in zip(parts, (0, 1, 1), strict=True)]
        sizes = [[count * lengths[which] for count, lengths in self._batches] for which in (0, 1, 1)]
        batched = zip(*(part.split(size) for part, size in zip(parts, sizes, strict=True)), strict=True)
        for (count, _), batch in zip(self._batches, batched, strict=True):
            queries, keys, values = (part.unflatten(0, (count, -1)).transpose(0, 1) for part in batch)
            yield queries, keys, values

    def join(self, attended: Iterable[Tensor]) -> Tensor:
        """What :meth:`split` made of the queries, [queries, segments, ...] each, in rows again: [s / cp, b, ...]."""
        joined = torch.cat([part.transpose(0, 1).flatten(0, 1) for part in attended])
        return self.in_rows(joined.index_select(0, self._orders[2]) if len(self._batches) > 1 else joined)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [b, s / cp]: how far each of this rank's tokens is from the beginning of its document."""
        parts = [torch.arange(keys - queries, keys) for queries, keys in self._lengths]
        return torch.cat(parts).view(self.num_rows, -1).to(device=self.device)

    @cached_property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Where segments begin and end among the queries and among the keys, int32 [segments + 1] each."""
        queries, keys = (
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)
            for lengths in (self.num_queries, self.num_keys)
        )
        return queries, keys

    @property
    def _lengths(self) -> list[tuple[int, int]]:
        return list(zip(self.num_queries, self.num_keys, strict=True))

    @cached_property
    def _batches(self) -> list[tuple[int, tuple[int, int]]]:
        """How many segments there are of each pair of lengths."""
        return [(count, lengths) for lengths, count in sorted(Counter(self._lengths).items())]

    @cached_property
    def _orders(self) -> tuple[Tensor, Tensor, Tensor]:
        """Indices that bring queries and keys into the order of :attr:`_batches`, and queries back."""
        segments = sorted(range(len(self._lengths)), key=self._lengths.__getitem__)
        orders = []
        for lengths in (self.num_queries, self.num_keys):
            begins = [0, *accumulate(lengths)]
            orders.append(torch.cat([torch.arange(begins[number], begins[number + 1]) for number in segments]))
        queries, keys, back = (order.to(device=self.device) for order in (*orders, orders[0].argsort()))
        return queries, keys, back
