"""Megatron's GPT model around ExoFormer layers. It adds the loss; anchors are the layers' own affair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_exo.model.documents import Documents
from megatron_exo.model.loss import vocab_parallel_cross_entropy

_STATE_OF_NORMS = "layernorm._extra_state"
"""Transformer Engine's norms announce a low-precision state that is always empty; other backends' norms have none."""


class ExoGPTModel(GPTModel):
    """``GPTModel`` whose loss leaves vocabulary padding out and reports the log-partition for the z-loss.

    Args:
        true_vocab_size: the tokenizer's vocabulary; rows of the embedding and the head beyond it are padding.
    """

    def __init__(self, *args: Any, true_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.true_vocab_size = true_vocab_size
        self.register_load_state_dict_post_hook(_do_not_miss_state_of_norms)

    def _preprocess(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        """Megatron's, with rotary embeddings [s / cp, b, 1, channels] that start anew where documents do."""
        decoder_input, rotary, *rest = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if isinstance(packed_seq_params, Documents) and packed_seq_params.restarts:
            whole = self.rotary_pos_emb.get_emb(packed_seq_params.max_seqlen_q)
            rotary = whole[packed_seq_params.positions.T].flatten(2, 3)
        return decoder_input, rotary, *rest

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> ShardedStateDict:
        """Megatron's, but every backend loads every other's checkpoints, and every wire every other's.

        The empty states of norms are left out, and copies of the anchor go by the name of the original.
        """
        state = super().sharded_state_dict(*args, **kwargs)
        for number, layer in enumerate(self.decoder.layers):
            if layer.anchor is not None and not layer.is_source:
                for name in state:
                    if f"decoder.layers.{number}.anchor." in name:
                        state[name] = self._copy_of_original(state[name], layer.layer_number - 1)
        return {name: part for name, part in state.items() if not name.endswith(_STATE_OF_NORMS)}

    def _copy_of_original(self, part: Any, layer: int) -> Any:
        original = f"layers.{self.config.exo.source_layer - 1}.anchor."
        key = part.key.replace(f"layers.{layer}.anchor.", original)
        return replace(part, key=key, replica_id=(self.pg_collection.pp.rank(), *part.replica_id[1:]))

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Per-token losses.

        Args:
            labels: int64 [b, s].
            logits: [s, b, padded_vocab / tp].

        Returns:
            float32 [b, s, 2]: cross-entropy, and the square of the log-partition (the z-loss before its weight).
        """
        loss, log_partition = vocab_parallel_cross_entropy(
            logits, labels.transpose(0, 1).contiguous(), self.true_vocab_size, self.pg_collection.tp
        )
        return torch.stack([loss, log_partition.square()], dim=-1).transpose(0, 1).contiguous()


def _do_not_miss_state_of_norms(module: torch.nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if not name.endswith(_STATE_OF_NORMS)]
