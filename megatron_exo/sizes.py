"""The sizes of a model, whoever states them: a command line, a preset, a checkpoint, a file of another implementation.

Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model, under Megatron's names."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Heads of K and of V; equal to ``num_attention_heads`` without grouped-query attention."""
    kv_channels: int
    """Channels per head."""
    ffn_hidden_size: int
    """Width of the SwiGLU product: the first MLP matrix has twice as many rows."""
    vocab_size: int
    """Rows of the embedding and of the head. Padding counts if, and only if, it is included here."""
    seq_length: int
    """Tokens of the longest sequence; no parameter depends on it."""
    tied_embeddings: bool = False
    """Whether the head is the embedding matrix."""
    rotary_base: float = 500000.0
    layernorm_epsilon: float = 1e-6

    def num_heads(self, component: str) -> int:
        """Heads of one of ``qkvg``: K and V have one per query group, Q and G one per attention head."""
        return self.num_query_groups if component in "kv" else self.num_attention_heads

    def width(self, components: str) -> int:
        """Channels of the named components together, over all heads."""
        return sum(self.num_heads(component) * self.kv_channels for component in components)

    def transformer_fields(self) -> dict[str, Any]:
        """Those that are fields of Megatron's ``TransformerConfig``; the others belong to the model around it."""
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.kv_channels,
            "ffn_hidden_size": self.ffn_hidden_size,
            "layernorm_epsilon": self.layernorm_epsilon,
        }
