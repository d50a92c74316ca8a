"""Transformer Engine's core attention with documents masked from each other, as sequences packed end to end (THD)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_exo.model.core_attention import gather_context
from megatron_exo.model.documents import Documents


class TEDocumentAttention(TEDotProductAttention):
    """Megatron's, but :class:`Documents` given as ``packed_seq_params`` are attended to one by one.

    With context parallelism, Transformer Engine cuts packed sequences one by one over the ranks, each into equal
    chunks, which documents of any length cannot be. So rows are cut as without masking, each rank gathers the keys and
    values, as on the local backend, and its chunks of queries are packed with the keys of their documents.
    """

    cp_group: Any  # set by the base class, which mypy does not see

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """As :meth:`megatron_exo.model.core_attention.SDPACoreAttention.forward`; all tensors on a GPU."""
        if not isinstance(packed_seq_params, Documents):
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params, num_splits
            )
        documents = packed_seq_params
        cp_group = self.cp_group
        is_shared = self.config.context_parallel_size > 1
        if is_shared:
            key, value = gather_context(torch.stack([key, value], dim=1), cp_group).unbind(1)
        cu_seqlens_q, cu_seqlens_kv = documents.cu_seqlens
        self.cp_group = None  # what the ranks exchange is here already
        try:
            attended = super(TEDotProductAttention, self).forward(
                documents.queries_end_to_end(query),
                documents.keys_end_to_end(key),
                documents.keys_end_to_end(value),
                attention_mask=None,
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_kv=cu_seqlens_kv,
                max_seqlen_q=documents.max_seqlen_q,  # of rows: an upper bound that is the same for every micro-batch
                max_seqlen_kv=documents.max_seqlen_kv,
                attn_mask_type="padding_causal_bottom_right" if is_shared else "padding_causal",
            )
        finally:
            self.cp_group = cp_group
        return documents.in_rows(attended.flatten(1))


class TEBackend(TESpecProvider):
    """Megatron's choice of Transformer Engine's modules, with :class:`TEDocumentAttention`."""

    def core_attention(self) -> type:
        return TEDocumentAttention
