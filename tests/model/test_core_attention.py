"""The local backend's attention is Megatron's own local attention, without the scores kept in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_exo.model.core_attention import SDPACoreAttention
from tests.layouts import Layout, start_parallel_state
from tests.ranks import run_on_ranks

BATCH, HEADS, HEAD_DIM = 2, 4, 8


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        attention_dropout=fields.pop("attention_dropout", 0.0),
        **fields,
    )


def _attention(config: TransformerConfig, mask_type: AttnMaskType = AttnMaskType.causal) -> SDPACoreAttention:
    return SDPACoreAttention(config, layer_number=1, attn_mask_type=mask_type, attention_type="self")


def _document_mask(lengths: list[int]) -> Tensor:
    """bool [1, 1, s, s]: causal, and closed between documents; true where attention is forbidden."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = (documents[:, None] == documents[None, :]).tril()
    return ~allowed[None, None]


@dataclass(frozen=True)
class Case:
    groups: int = HEADS
    queries: int = 12
    keys: int = 12
    mask_type: AttnMaskType = AttnMaskType.causal
    documents: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Q [sq, b, n, d], K and V [sk, b, groups, d], and the mask."""
        generator = torch.Generator().manual_seed(11)

        def random(length: int, heads: int) -> Tensor:
            tensor = torch.randn(length, BATCH, heads, HEAD_DIM, generator=generator)
            return tensor.to(self.dtype).requires_grad_()

        mask = _document_mask(list(self.documents)) if self.documents else None
        return random(self.queries, HEADS), random(self.keys, self.groups), random(self.keys, self.groups), mask


AGAINST_MEGATRON = {
    "multi-head": Case(),
    "grouped queries": Case(groups=2),
    "one query group": Case(groups=1),
    "documents": Case(groups=2, documents=(5, 1, 6)),
    "documents, declared as padding": Case(documents=(3, 9), mask_type=AttnMaskType.padding),
    "one query after a cache": Case(groups=2, queries=1, keys=7),
    "no mask": Case(mask_type=AttnMaskType.no_mask, queries=5, keys=9),
    "bfloat16": Case(groups=2, dtype=torch.bfloat16),
}


def _results(attention: torch.nn.Module, case: Case) -> list[Tensor]:
    """Output and gradients of Q, K and V."""
    query, key, value, mask = case.inputs()
    output = attention(query, key, value, mask, attn_mask_type=case.mask_type)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(13))
    (output.float() * cotangent).sum().backward()
    return [output.detach(), query.grad, key.grad, value.grad]


def _both(cases: dict[str, Case]) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    start_parallel_state(Layout())
    groups = ProcessGroupCollection.use_mpu_process_groups()
    results = {}
    for name, case in cases.items():
        config = _config(num_query_groups=case.groups, masked_softmax_fusion=False, params_dtype=case.dtype)
        megatrons = DotProductAttention(
            config, layer_number=1, attn_mask_type=case.mask_type, attention_type="self", pg_collection=groups
        )
        results[name] = _results(_attention(config, case.mask_type), case), _results(megatrons, case)
    return results


@pytest.fixture(scope="module")
def both() -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    return run_on_ranks(1, _both, AGAINST_MEGATRON)[0]


@pytest.mark.parametrize("name", AGAINST_MEGATRON)
def test_outputs_and_gradients_are_those_of_megatrons_local_attention(both: dict[str, Any], name: str) -> None:
    # Megatron rounds the scores to bfloat16, which have eight bits.
    tolerance = 3e-6 if AGAINST_MEGATRON[name].dtype == torch.float32 else 0.05
    for our, their in zip(*both[name], strict=True):
        assert our.dtype == their.dtype
        torch.testing.assert_close(our, their, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("queries", [1, 3, 7])
def test_queries_after_a_cache_see_what_they_would_see_in_the_whole_sequence(queries: int) -> None:
    case = Case(groups=2, queries=queries, keys=7)
    query, key, value, _ = case.inputs()
    output = _attention(_config(num_query_groups=2))(query, key, value, None)
    for row in range(queries):
        visible = 7 - queries + row + 1
        for head in range(HEADS):
            keys, values = (tensor[:visible, :, head // 2] for tensor in (key, value))
            scores = torch.einsum("bd,kbd->bk", query[row, :, head], keys) / math.sqrt(HEAD_DIM)
            expected = torch.einsum("bk,kbd->bd", scores.softmax(-1), values)
            ours = output[row].view(BATCH, HEADS, HEAD_DIM)[:, head]
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_change_in_one_document_leaves_the_others_bits_alone() -> None:
    case = Case(documents=(5, 7))
    attention = _attention(_config())
    query, key, value, mask = case.inputs()
    before = attention(query, key, value, mask)
    with torch.no_grad():
        for tensor in (query, key, value):
            tensor[:5] += 1.0
    after = attention(query, key, value, mask)
    assert not torch.equal(before[:5], after[:5])
    assert torch.equal(before[5:], after[5:])


def test_the_scale_of_the_scores_can_be_given() -> None:
    query, key, value, _ = Case().inputs()
    config = _config()
    scaled = SDPACoreAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=0.5)(query, key, value, None)
    same = _attention(config)(query * 0.5 * math.sqrt(HEAD_DIM), key, value, None)
    torch.testing.assert_close(scaled, same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", [HEADS, 2])
def test_no_tensor_of_the_size_of_the_scores_is_kept_for_the_backward_pass(groups: int) -> None:
    length = 256
    query, key, value, _ = Case(groups=groups, queries=length, keys=length).inputs()
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _attention(_config(num_query_groups=groups))(query, key, value, None)
    assert max(kept) == query.numel() < length * length


def _dropout(sequence_parallel: bool) -> tuple[bool, bool, bool]:
    """Whether training drops, whether evaluation does not, and whether the draws were the tracker's."""
    start_parallel_state(Layout())
    config = _config(attention_dropout=0.5)
    config.sequence_parallel = sequence_parallel
    attention = _attention(config)
    query, key, value, _ = Case().inputs()
    plain = _attention(_config())(query, key, value, None)
    default, tracked = torch.get_rng_state(), get_cuda_rng_tracker().get_states()["model-parallel-rng"]
    dropped = attention(query, key, value, None)
    default_moved = not torch.equal(default, torch.get_rng_state())
    tracked_moved = not torch.equal(tracked, get_cuda_rng_tracker().get_states()["model-parallel-rng"])
    assert default_moved is not tracked_moved
    return not torch.equal(plain, dropped), torch.equal(attention.eval()(query, key, value, None), plain), tracked_moved


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_draws_from_the_state_of_the_tensor_parallel_rank(sequence_parallel: bool) -> None:
    # With sequence parallelism, Megatron runs whole layers on that state, and the module must not enter it again.
    assert run_on_ranks(1, _dropout, sequence_parallel) == [(True, True, not sequence_parallel)]


CONTEXT_PARALLEL = {
    "multi-head": Case(queries=16, keys=16),
    "grouped queries": Case(groups=2, queries=16, keys=16),
    "documents": Case(groups=2, queries=16, keys=16, documents=(5, 11)),
    "no mask": Case(queries=16, keys=16, mask_type=AttnMaskType.no_mask),
}


def _on_context_parallel_ranks(size: int, cases: dict[str, Case]) -> dict[str, list[Tensor]]:
    """This rank's part of the output and of the gradients of Q, K and V."""
    start_parallel_state(Layout(cp=size))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    results = {}
    for name, case in cases.items():
        config = _config(num_query_groups=case.groups, context_parallel_size=size)
        attention = SDPACoreAttention(config, 1, case.mask_type, "self", pg_collection=groups)
        *wholes, mask = case.inputs()
        parts = [_my_chunks(whole.detach(), 0, groups.cp).requires_grad_() for whole in wholes]
        output = attention(*parts, None if mask is None else _my_chunks(mask, 2, groups.cp))
        cotangent = torch.randn(case.queries, *output.shape[1:], generator=torch.Generator().manual_seed(13))
        (output * _my_chunks(cotangent, 0, groups.cp)).sum().backward()
        results[name] = [output.detach(), *(part.grad for part in parts)]
    return results


def _my_chunks(whole: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """What Megatron gives this rank of a sequence."""
    return get_pos_emb_on_this_cp_rank(whole, dim, group)


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_compute_their_parts_of_the_whole_sequences_attention(size: int) -> None:
    ranks = run_on_ranks(size, _on_context_parallel_ranks, size, CONTEXT_PARALLEL)
    for name, case in CONTEXT_PARALLEL.items():
        attention = _attention(_config(num_query_groups=case.groups), case.mask_type)
        for number, whole in enumerate(_results(attention, case)):
            chunks = whole.chunk(2 * size)
            for rank, result in enumerate(ranks):
                mine = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
                torch.testing.assert_close(result[name][number], mine, rtol=3e-6, atol=3e-6)


def _decode_with_context_parallelism() -> str:
    start_parallel_state(Layout(cp=2))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    query, key, value, _ = Case(queries=1, keys=7).inputs()
    config = _config(context_parallel_size=2)
    with pytest.raises(ValueError, match="a key-value cache cannot be used with context parallelism") as refused:
        SDPACoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=groups)(query, key, value, None)
    return str(refused.value)


def test_a_cache_with_context_parallelism_is_refused() -> None:
    assert "generate with --context-parallel-size 1" in run_on_ranks(2, _decode_with_context_parallelism)[0]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"window_size": (4, 0)}, "sliding-window attention"),
        ({"softmax_type": "learnable"}, "softmax type 'learnable'"),
        ({"apply_query_key_layer_scaling": True}, "query-key layer scaling"),
    ],
)
def test_what_it_cannot_compute_is_refused_on_construction(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what) as refused:
        _attention(_config(**fields))
    assert "--transformer-impl transformer_engine" in str(refused.value)


@pytest.mark.parametrize("argument", ["packed_seq_params", "attention_bias"])
def test_packed_sequences_and_a_bias_are_refused_instead_of_ignored(argument: str) -> None:
    query, key, value, _ = Case().inputs()
    with pytest.raises(ValueError, match="neither packed sequences"):
        _attention(_config())(query, key, value, None, **{argument: torch.zeros(1)})
