"""Documents through Transformer Engine's attention, on a machine that cannot run it.

Its ``forward`` is replaced by attention written down, behind the real signature: what is tested is that arguments have
the names, shapes and meaning that its documentation gives them, and nothing of its kernels.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import transformer_engine.pytorch as te
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_exo.model import te_attention
from megatron_exo.model.core_attention import SDPACoreAttention
from megatron_exo.model.documents import Documents
from tests.plain_attention import attend_packed

ROWS = [[0, 5, 13, 24], [0, 9, 10, 24]]
HEADS, HEAD_DIM = 4, 8


def differences() -> dict[str, Any]:
    """Context-parallel place → largest difference from the local backend; and what was asked of Transformer Engine."""
    config = TransformerConfig(
        num_layers=2, hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, attention_dropout=0.0
    )
    arguments: Any = (config, 1, AttnMaskType.causal, "self")
    local = SDPACoreAttention(*arguments)
    attention = te_attention.TEDocumentAttention(
        *arguments, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )
    query, key, value = torch.randn(3, 24, len(ROWS), HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(3))
    expected = local(query, key, value, None, packed_seq_params=Documents.of_rows(ROWS))

    found, masks, groups = {}, [], []

    def forward(self: Any, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, **given: Any) -> Tensor:
        assert given["qkv_format"] == "thd"
        assert max(given["cu_seqlens_q"].diff()) <= given["max_seqlen_q"]
        assert max(given["cu_seqlens_kv"].diff()) <= given["max_seqlen_kv"]
        masks.append(given["attn_mask_type"])
        groups.append(self.cp_group)
        cu_seqlens = given["cu_seqlens_q"], given["cu_seqlens_kv"]
        return attend_packed(query_layer, key_layer, value_layer, *cu_seqlens).flatten(1)

    def gather_context(part: Tensor, cp_group: Any) -> Tensor:
        return torch.stack([key, value], dim=1)

    with (
        mock.patch.object(te.DotProductAttention, "forward", autospec=True, side_effect=forward),
        mock.patch.object(te_attention, "gather_context", gather_context),
    ):
        for size, rank in ((1, 0), (2, 0), (2, 1)):
            config.context_parallel_size = size
            attention.cp_group = "the ranks that share a row" if size > 1 else None
            mine = [tensor.chunk(2 * size) for tensor in (query, key, value, expected)]
            parts = [torch.cat([chunks[rank], chunks[2 * size - 1 - rank]]) for chunks in mine]
            documents = Documents.of_rows(ROWS, size, rank)
            ours = attention(*parts[:3], None, AttnMaskType.causal, packed_seq_params=documents)
            found[f"cp{size}-rank{rank}"] = float((ours - parts[3]).abs().max())
    return {"differences": found, "masks": masks, "groups": groups, "group afterwards": attention.cp_group}
