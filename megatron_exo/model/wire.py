"""What pipeline stages send each other: hidden states with the anchor, or its source, beside them, in one tensor.

Megatron's schedules send, free and backpropagate exactly one tensor per micro-batch and stage boundary. The last
layer of a chunk therefore concatenates what travels to the hidden states along the last dimension, and the first layer
of the next chunk splits them again; autograd returns the gradient of both in the one gradient tensor, and the
traveller's gradient grows from stage to stage on its way back to where it came from.

With ``exo_wire="anchors"`` the joined anchor travels. With ``"source"`` the hidden states that it is projected from
do: narrower, but each later stage holds a copy of the anchor's matrices, whose gradients Megatron sums over the
pipeline group (as for conditional embedders).
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
    if config.wires_source:
        return config.hidden_size
    width = config.anchor_width
    return width if config.sequence_parallel else width // config.tensor_model_parallel_size


@dataclass(frozen=True)
class Wire:
    """Opens and closes the wire around one layer.

    A layer's *context* is the joined anchor, [s, b, D / tp]. Where the source is to travel on to another stage, its
    channels follow the anchor's in the context, for there is one context tensor per micro-batch, and a layer at the
    end of the chunk has no other way to it. So what travels always is the end of the context.
    """

    hidden_size: int
    width: int
    opens: bool
    """Whether this layer is the first of a chunk that receives from another stage."""
    closes: bool
    """Whether this layer is the last of a chunk that sends to another stage."""
    fold: int
    """Parts of the sequence that are folded into channels: tp where context meets sequence parallelism, else 1."""
    carries_source: bool
    """Whether this layer's chunk sends the anchor's source to another stage."""
    receives_source: bool
    """Whether this layer's chunk receives the anchor's source, and makes the anchor of it."""

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
        sends = width > 0 and global_number - local_number + in_chunk < config.num_layers
        receives = width > 0 and global_number > local_number
        folds = config.sequence_parallel and config.exo.anchor != "none"
        return cls(
            hidden_size=config.hidden_size,
            width=width,
            opens=receives and local_number == 1,
            closes=sends and local_number == in_chunk,
            fold=config.tensor_model_parallel_size if folds else 1,
            carries_source=sends and config.wires_source,
            receives_source=receives and config.wires_source,
        )

    def unpack(self, hidden_states: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[s, b, h + width] → hidden states [s, b, h] and what travelled; elsewhere both arguments as they are."""
        if not self.opens:
            return hidden_states, context
        hidden_states, arrived = torch.split(hidden_states, [self.hidden_size, self.width], dim=-1)
        return hidden_states, arrived if self.receives_source else self._unfold(arrived)

    def join(self, anchor: Tensor, source: Tensor) -> Tensor:
        """The context of an anchor [s, b, D / tp] that was made of a source [s, b, h] ([s / tp, b, h])."""
        return torch.cat([anchor, self._unfold(source)], dim=-1) if self.carries_source else anchor

    def anchor(self, context: Tensor | None) -> Tensor | None:
        """The joined anchor in a context."""
        if context is None or not self.carries_source:
            return context
        return context[..., : context.shape[-1] - self.width // self.fold]

    def pack(self, hidden_states: Tensor, context: Tensor | None) -> Tensor:
        """Hidden states [s, b, h] and context → [s, b, h + width]; elsewhere the hidden states as they are."""
        if not self.closes:
            return hidden_states
        if context is None:  # the source layer is on a later stage: the room beside the hidden states stays empty
            travels = hidden_states.new_zeros(*hidden_states.shape[:-1], self.width)
        else:
            travels = self._fold(context[..., context.shape[-1] - self.width // self.fold :])
        return torch.cat([hidden_states, travels], dim=-1)

    def _fold(self, whole: Tensor) -> Tensor:
        """[s, b, w / tp] → [s / tp, b, w] without communication: which numbers a rank holds does not change."""
        return whole if self.fold == 1 else whole.unflatten(0, (self.fold, -1)).permute(1, 2, 0, 3).flatten(2)

    def _unfold(self, folded: Tensor) -> Tensor:
        """The inverse of :meth:`_fold`."""
        return folded if self.fold == 1 else folded.unflatten(-1, (self.fold, -1)).permute(2, 0, 1, 3).flatten(0, 1)


class ExoP2PCommunicator(P2PCommunicator):
    """Megatron's stage-to-stage communication with room for the anchor beside the hidden states."""

    def _communicate(self, *, tensor_shape: Any, **kwargs: Any) -> Any:
        if tensor_shape is not None:
            tensor_shape = (*tensor_shape[:-1], tensor_shape[-1] + wire_width(self.config))
        return super()._communicate(tensor_shape=tensor_shape, **kwargs)
