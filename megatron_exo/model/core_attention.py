"""The local backend's core attention, over ``torch.nn.functional.scaled_dot_product_attention``.

Megatron's own local attention keeps the [b, heads, s, s] probabilities; this one leaves the choice of a kernel that
does not to torch, on CPUs and on GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_exo.errors import UserError


class SDPACoreAttention(torch.nn.Module):
    """Causal or explicitly masked attention with grouped queries; the same results as Megatron's local attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__()
        for wanted, what in (
            (config.context_parallel_size > 1, "context parallelism"),
            (config.window_size is not None, "sliding-window attention"),
            (config.softmax_type != "vanilla", f"softmax type {config.softmax_type!r}"),
            (config.apply_query_key_layer_scaling, "query-key layer scaling"),
        ):
            if wanted:
                raise UserError(
                    f"the local backend's attention does not support {what}; use --transformer-impl transformer_engine"
                )
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.sequence_parallel = config.sequence_parallel

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [sq, b, heads / tp, head_dim].
            key, value: [sk, b, query groups / tp, head_dim]; with a cache sk > sq, and the queries are the last sq.
            attention_mask: bool, broadcastable to [b, heads, sq, sk], true where attention is **forbidden**
                (Megatron's convention). ``None`` with a causal mask type means causal.

        Returns:
            [sq, b, heads / tp * head_dim].
        """
        if packed_seq_params is not None or attention_bias is not None:
            raise UserError(
                "the local backend's attention takes neither packed sequences (THD) nor an attention bias; "
                "pass an attention mask, or use --transformer-impl transformer_engine"
            )
        sq, sk = query.shape[0], key.shape[0]
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        allowed: Tensor | None = None
        is_causal = False
        if attention_mask is not None:
            allowed = ~attention_mask
        elif mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal):
            if sq == sk:
                is_causal = sq > 1
            elif sq > 1:  # a chunk of queries at the end of a cache
                allowed = torch.ones(sq, sk, dtype=torch.bool, device=query.device).tril(sk - sq)

        # [s, b, n, d] -> [b, n, s, d]
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        dropout = self.dropout if self.training else 0.0

        def attend() -> Tensor:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=allowed,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )

        if dropout > 0.0 and not self.sequence_parallel:
            with get_cuda_rng_tracker().fork():  # heads differ over the tensor-parallel ranks, so must the draws
                attended = attend()
        else:
            attended = attend()
        return attended.permute(2, 0, 1, 3).flatten(2)
