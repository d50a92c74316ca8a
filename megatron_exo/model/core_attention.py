"""The local backend's core attention, over ``torch.nn.functional.scaled_dot_product_attention``.

Megatron's own local attention keeps the [b, heads, s, s] probabilities and knows no context parallelism. This one
leaves the choice of a kernel that keeps none to torch, on CPUs and on GPUs, gathers keys and values over the
context-parallel ranks, and masks documents from each other by attending to each of them by itself.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron_exo.errors import UserError
from megatron_exo.model.documents import Documents


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
        self.cp_group = pg_collection.cp if pg_collection is not None and config.context_parallel_size > 1 else None

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
                With context parallelism each is this rank's part of the sequence, s / cp, and is gathered here.
            attention_mask: bool, broadcastable to [b, heads, sq, all keys], true where attention is **forbidden**
                (Megatron's convention). ``None`` with a causal mask type means causal.
            packed_seq_params: :class:`Documents` that are masked from each other; within each, attention is causal.

        Returns:
            [sq, b, heads / tp * head_dim].
        """
        documents = packed_seq_params
        if not isinstance(documents, Documents | None) or attention_bias is not None:
            raise UserError(
                "the local backend's attention takes neither packed sequences (THD) nor an attention bias; "
                "pass an attention mask, or use --transformer-impl transformer_engine"
            )
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        is_causal = attention_mask is None and mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal)
        allowed = None if attention_mask is None else ~attention_mask
        if self.cp_group is not None:
            if key.shape[0] != query.shape[0]:
                raise UserError(
                    "a key-value cache cannot be used with context parallelism on the local backend; "
                    "generate with --context-parallel-size 1"
                )
            key, value = gather_context(torch.stack([key, value], dim=1), self.cp_group).unbind(1)
        if documents is not None:
            if not is_causal or key.shape[0] != documents.max_seqlen_kv:
                raise UserError(
                    "documents are masked from each other in causal attention over whole rows alone; "
                    "leave out the attention mask and the key-value cache"
                )
            return documents.join(
                self._attend(*segments, allowed=None, is_causal=True) for segments in documents.split(query, key, value)
            )
        if self.cp_group is None or not is_causal:
            return self._attend(query, key, value, allowed, is_causal)
        # Each of this rank's two chunks of queries sees the keys up to its own end.
        size, rank = self.cp_group.size(), self.cp_group.rank()
        attended = []
        for chunk, number in zip(query.chunk(2), (rank, 2 * size - 1 - rank), strict=True):
            end = (number + 1) * chunk.shape[0]
            attended.append(self._attend(chunk, key[:end], value[:end], None, is_causal=True))
        return torch.cat(attended)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, is_causal: bool) -> Tensor:
        """Attention of queries that, where it is causal, are the last of the keys' positions; shapes as in forward."""
        sq, sk = query.shape[0], key.shape[0]
        if is_causal and sq != sk:
            is_causal = False
            if sq > 1:
                allowed = torch.ones(sq, sk, dtype=torch.bool, device=query.device).tril(sk - sq)

        # [s, b, n, d] -> [b, n, s, d]
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # Heads differ over the tensor-parallel ranks, so must the draws.
        draws = get_cuda_rng_tracker().fork() if dropout > 0.0 and not self.sequence_parallel else nullcontext()
        with draws:
            attended = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=allowed,
                dropout_p=dropout,
                is_causal=is_causal and sq > 1,
                scale=self.softmax_scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        return attended.permute(2, 0, 1, 3).flatten(2)


def gather_context(part: Tensor, cp_group: dist.ProcessGroup) -> Tensor:
    """The whole sequence from each context-parallel rank's part; gradients are summed over the ranks.

    Megatron cuts a sequence into 2·cp chunks and gives rank r the chunks r and 2·cp-1-r, so that causal attention
    costs every rank the same.

    Args:
        part: [s / cp, ...], the two chunks of this rank.

    Returns:
        [s, ...] in the order of the positions.
    """
    gathered = gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=True, group=cp_group)
    first, second = gathered.unflatten(0, (cp_group.size(), 2, -1)).unbind(1)
    return torch.cat([first.flatten(0, 1), second.flip(0).flatten(0, 1)])
