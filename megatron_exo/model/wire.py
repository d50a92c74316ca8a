"""What pipeline stages send each other: hidden states with the anchor beside them, in one tensor.

Megatron's schedules send, free and backpropagate exactly one tensor per micro-batch and stage boundary. The last
layer of a chunk therefore concatenates the anchor to the hidden states along the last dimension, and the first layer
of the next chunk splits them again; autograd returns the gradient of both in the one gradient tensor, and the anchor's
gradient grows from stage to stage on its way back to the source.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from torch import Tensor

from megatron_exo.model.config import ExoTransformerConfig


def wire_width(config: ExoTransformerConfig) -> int:
    """Channels that ride beside the hidden states over a stage boundary, as one rank sends them.

    With sequence parallelism a rank sends [s / tp, b, ·], so the anchor [s, b, D / tp] is folded to [s / tp, b, D].
    """
    exo = config.exo
    if exo.control == "embedding-residual":
        return config.hidden_size
    if exo.anchor == "none":
        return 0
    width = config.anchor_width
    return width if config.sequence_parallel else width // config.tensor_model_parallel_size


@dataclass(frozen=True)
class Wire:
    """Opens and closes the wire around one layer."""

    hidden_size: int
    width: int
    opens: bool
    """Whether this layer is the first of a chunk that receives from another stage."""
    closes: bool
    """Whether this layer is the last of a chunk that sends to another stage."""
    fold: int
    """Parts of the sequence that are folded into channels: tp where an anchor meets sequence parallelism, else 1."""

    @classmethod
    def of_layer(
        cls,
        config: ExoTransformerConfig,
        local_number: int,
        global_number: int,
        vp_stage: int | None,
        pg_collection: ProcessGroupCollection,
    ) -> Wire:
        """The wire at the layer that is ``local_number`` (from 1) in its chunk and ``global_number`` in the model."""
        width = wire_width(config) if config.pipeline_model_parallel_size > 1 else 0
        in_chunk = get_num_layers_to_build(config, vp_stage, pg_collection.pp.rank()) if width else 0
        folds = config.sequence_parallel and config.exo.anchor != "none"
        return cls(
            hidden_size=config.hidden_size,
            width=width,
            opens=width > 0 and local_number == 1 and global_number > 1,
            closes=width > 0 and local_number == in_chunk and global_number < config.num_layers,
            fold=config.tensor_model_parallel_size if folds else 1,
        )

    def unpack(self, hidden_states: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[s, b, h + width] → hidden states [s, b, h] and context; elsewhere both as they are."""
        if not self.opens:
            return hidden_states, context
        hidden_states, folded = torch.split(hidden_states, [self.hidden_size, self.width], dim=-1)
        if self.fold > 1:
            folded = folded.unflatten(-1, (self.fold, -1)).permute(2, 0, 1, 3).flatten(0, 1)
        return hidden_states, folded

    def pack(self, hidden_states: Tensor, context: Tensor | None) -> Tensor:
        """Hidden states [s, b, h] and context → [s, b, h + width]; elsewhere the hidden states as they are."""
        if not self.closes:
            return hidden_states
        if context is None:  # the source layer is on a later stage: the room beside the hidden states stays empty
            folded = hidden_states.new_zeros(*hidden_states.shape[:-1], self.width)
        elif self.fold > 1:
            folded = context.unflatten(0, (self.fold, -1)).permute(1, 2, 0, 3).flatten(2)
        else:
            folded = context
        return torch.cat([hidden_states, folded], dim=-1)


class ExoP2PCommunicator(P2PCommunicator):
    """Megatron's stage-to-stage communication with room for the anchor beside the hidden states."""

    def _communicate(self, *, tensor_shape: Any, **kwargs: Any) -> Any:
        if tensor_shape is not None:
            tensor_shape = (*tensor_shape[:-1], tensor_shape[-1] + wire_width(self.config))
        return super()._communicate(tensor_shape=tensor_shape, **kwargs)
