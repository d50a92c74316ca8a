"""Our core attention computes what Megatron's local one does, and keeps less."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_exo.model.core_attention import SDPACoreAttention
from megatron_exo.variants import VARIANTS
from tests.layouts import Layout, start_parallel_state, transformer_config
from tests.plain_reference import PlainSizes
from tests.ranks import run_on_ranks

EXO = VARIANTS["base"].exo
SEQUENCE, BATCH, HEADS, HEAD_DIM = 10, 3, 4, 8


def _attention(kind: type, groups: int, **fields: Any) -> torch.nn.Module:
    config = transformer_config(EXO, PlainSizes(num_query_groups=groups), Layout(transformer=fields))
    return kind(config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self")


def _inputs(groups: int, queries: int = SEQUENCE) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(queries, HEADS), (SEQUENCE, groups), (SEQUENCE, groups)]
    return [torch.randn(s, BATCH, heads, HEAD_DIM, requires_grad=True) for s, heads in shapes]


def _documents_mask() -> Tensor:
    """Two documents of 4 and 6 tokens, causal inside; true where attention is forbidden."""
    document = torch.tensor([0] * 4 + [1] * 6)
    allowed = (document[:, None] == document[None, :]).tril()
    return ~allowed.view(1, 1, SEQUENCE, SEQUENCE)


def _outputs_and_gradients(kind: type, groups: int, masked: bool) -> list[Tensor]:
    start_parallel_state(Layout())
    attention, inputs = _attention(kind, groups), _inputs(groups)
    # Megatron's masks causally only where a fused kernel does it; without one it takes the mask as it is given.
    mask = _documents_mask() if masked else None
    if not masked and kind is DotProductAttention:
        mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).view(1, 1, SEQUENCE, SEQUENCE)
    output = attention(*inputs, mask)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    (output * weights).sum().backward()
    return [output.detach(), *(tensor.grad for tensor in inputs)]


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "explicit mask"])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_outputs_and_gradients_are_those_of_megatrons_local_attention(groups: int, masked: bool) -> None:
    ours, theirs = (
        run_on_ranks(1, _outputs_and_gradients, kind, groups, masked)[0]
        for kind in (SDPACoreAttention, DotProductAttention)
    )
    for mine, their in zip(ours, theirs, strict=True):
        assert mine.shape == their.shape
        assert (mine - their).abs().max() < 1e-5


@pytest.mark.parametrize("queries", [1, 4, SEQUENCE])
def test_the_last_queries_of_a_cache_see_everything_before_them(queries: int) -> None:
    attention = _attention(SDPACoreAttention, groups=2)
    query, key, value = _inputs(2, queries)
    output = attention(query, key, value, None).view(queries, BATCH, HEADS, HEAD_DIM)
    for q in range(queries):
        seen = SEQUENCE - queries + q + 1
        for head in range(HEADS):
            k, v = key[:seen, :, head // 2], value[:seen, :, head // 2]
            scores = torch.einsum("bd,sbd->sb", query[q, :, head], k) / math.sqrt(HEAD_DIM)
            expected = torch.einsum("sb,sbd->bd", scores.softmax(0), v)
            assert torch.allclose(output[q, :, head], expected, atol=1e-5)


def test_no_tensor_of_sequence_by_sequence_is_kept_for_the_backward_pass() -> None:
    sequence, kept = 64, []
    attention = _attention(SDPACoreAttention, groups=4)
    query, key, value = (torch.randn(sequence, 1, 4, HEAD_DIM, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        attention(query, key, value, None).sum().backward()
    assert kept
    assert max(kept) < sequence * sequence


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window_size": (4, 0)}, "sliding-window"),
        ({"softmax_type": "off-by-one"}, "softmax type"),
        ({"apply_query_key_layer_scaling": True}, "layer scaling"),
    ],
)
def test_what_it_does_not_support_is_refused_with_an_alternative(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"{words}.*use --transformer-impl transformer_engine"):
        _attention(SDPACoreAttention, 4, **fields)


def test_masks_that_it_would_have_to_ignore_are_refused() -> None:
    attention, inputs = _attention(SDPACoreAttention, 4), _inputs(4)
    with pytest.raises(ValueError, match="packed sequences"):
        attention(*inputs, None, packed_seq_params=PackedSeqParams(qkv_format="thd"))
    with pytest.raises(ValueError, match="attention bias"):
        attention(*inputs, None, attention_bias=torch.zeros(1))
