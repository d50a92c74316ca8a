"""Documents attend to themselves alone: where they begin, and what each backend's attention is given of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_exo.errors import UserError
from megatron_exo.model.core_attention import SDPACoreAttention
from megatron_exo.model.documents import DocumentMask, Documents
from tests.plain_attention import attend, attend_packed

LENGTH, HEADS, HEAD_DIM = 24, 4, 8
ROWS = {
    "one document a row": [[0, 24], [0, 24]],
    "several documents": [[0, 5, 13, 24], [0, 9, 10, 24]],
    "tokens that are documents": [list(range(25)), [0, 24]],
    "documents of equal lengths": [[0, 8, 16, 24], [0, 8, 16, 24]],
    "one row": [[0, 1, 17, 24]],
}
PLACES = [(1, 0), (2, 0), (2, 1), (3, 1)]
"""Context-parallel size and rank."""


def _inputs(rows: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Q [s, b, heads, d], K and V [s, b, groups, d]."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(LENGTH, rows, heads, HEAD_DIM) for heads in (HEADS, groups, groups)]
    query, key, value = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    return query, key, value


def _attention(groups: int = HEADS) -> SDPACoreAttention:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=groups,
        attention_dropout=0.0,
    )
    return SDPACoreAttention(config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")


def _explicit_mask(rows: Sequence[Sequence[int]]) -> Tensor:
    """bool [b, 1, s, s], true where attention is forbidden."""
    masks = []
    for row in rows:
        number = torch.repeat_interleave(torch.arange(len(row) - 1), torch.tensor([b - a for a, b in pairwise(row)]))
        masks.append(~(number[:, None] == number[None, :]).tril())
    return torch.stack(masks)[:, None]


def _with_gradients(output: Tensor, inputs: Iterable[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the inputs under cotangents that depend on place and channel alone."""
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(13))
    return [output.detach(), *torch.autograd.grad((output * cotangent).sum(), list(inputs))]


def test_a_document_begins_at_the_separator_and_every_row_at_its_first_token() -> None:
    tokens = torch.tensor([[5, 9, 9, 1, 2, 9], [9, 3, 3, 3, 3, 3], [1, 2, 3, 4, 5, 6]])
    boundaries = DocumentMask(separator=9).boundaries(tokens)
    assert boundaries.dtype == torch.int32
    assert boundaries.tolist() == [
        [0, 1, 2, 5, 6, 6, 6],
        [0, 6, 6, 6, 6, 6, 6],
        [0, 6, 6, 6, 6, 6, 6],
    ]


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("name", ROWS)
def test_attention_and_gradients_are_those_under_an_explicit_mask(name: str, groups: int) -> None:
    rows, inputs, attention = ROWS[name], _inputs(len(ROWS[name]), groups), _attention(groups)
    ours = attention(*inputs, None, packed_seq_params=Documents.of_rows(rows))
    expected = attention(*inputs, _explicit_mask(rows))
    for mine, theirs in zip(_with_gradients(ours, inputs), _with_gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert ours.is_contiguous()


def _part(whole: Tensor, size: int, rank: int) -> Tensor:
    """What a context-parallel rank has of [s, ...]."""
    if size == 1:
        return whole
    chunks = whole.chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


@pytest.mark.parametrize("packed", [False, True], ids=["in batches", "end to end"])
@pytest.mark.parametrize("place", PLACES, ids="cp{0[0]}-rank{0[1]}".format)
@pytest.mark.parametrize("name", ROWS)
def test_every_context_parallel_rank_attends_to_the_documents_of_its_queries(
    name: str, place: tuple[int, int], packed: bool
) -> None:
    # "in batches" is what the local backend computes; "end to end" is what Transformer Engine is asked for (THD).
    rows, inputs = ROWS[name], _inputs(len(ROWS[name]), HEADS)
    documents = Documents.of_rows(rows, *place)
    query = _part(inputs[0], *place)
    if packed:
        query, key, value = documents.queries_end_to_end(query), *map(documents.keys_end_to_end, inputs[1:])
        ours = documents.in_rows(attend_packed(query, key, value, *documents.cu_seqlens))
    else:
        ours = documents.join(attend(*segments) for segments in documents.split(query, *inputs[1:]))
    expected = _attention()(*inputs, _explicit_mask(rows)).unflatten(-1, (HEADS, HEAD_DIM))
    results = _with_gradients(ours, inputs), _with_gradients(_part(expected, *place), inputs)
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
def test_positions_count_from_the_beginning_of_each_document(place: tuple[int, int]) -> None:
    for rows in ROWS.values():
        expected = [torch.cat([torch.arange(end - begin) for begin, end in pairwise(row)]) for row in rows]
        ours = Documents.of_rows(rows, *place).positions
        assert torch.equal(ours, _part(torch.stack(expected, dim=1), *place).T)


def test_a_change_in_one_document_leaves_the_others_bits_alone_even_where_it_becomes_two() -> None:
    inputs, attention = _inputs(2, HEADS), _attention()
    before = attention(*inputs, None, packed_seq_params=Documents.of_rows([[0, 5, 13, 24], [0, 9, 10, 24]]))
    with torch.no_grad():
        for tensor in inputs:
            tensor[5:13, 0] += 1.0
    after = attention(*inputs, None, packed_seq_params=Documents.of_rows([[0, 5, 9, 13, 24], [0, 9, 10, 24]]))
    assert (before[5:13, 0] != after[5:13, 0]).any(dim=-1).all()
    for begin, end, row in ((0, 5, 0), (13, 24, 0), (0, 24, 1)):
        assert torch.equal(before[begin:end, row], after[begin:end, row])


def test_no_tensor_with_a_number_for_every_pair_of_tokens_is_kept_for_the_backward_pass() -> None:
    length = 512
    query, key, value = (torch.randn(length, 1, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    documents = Documents.of_rows([[0, 100, 130, length]])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _attention()(query, key, value, None, packed_seq_params=documents)
    assert max(kept) <= query.numel() < length * length


@pytest.mark.parametrize(
    ("keys", "arguments"),
    [(LENGTH, {"attention_mask": torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool)}), (LENGTH + 1, {})],
    ids=["a mask besides", "a cache"],
)
def test_documents_are_not_ignored_where_attention_is_of_another_kind(keys: int, arguments: dict[str, Any]) -> None:
    query, key, value = (torch.zeros(length, 1, HEADS, HEAD_DIM) for length in (LENGTH, keys, keys))
    with pytest.raises(UserError, match="leave out the attention mask and the key-value cache"):
        _attention()(
            query, key, value, **({"attention_mask": None} | arguments), packed_seq_params=Documents.of_rows([[0, 24]])
        )
