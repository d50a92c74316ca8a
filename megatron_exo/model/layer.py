"""The transformer layer that makes, reads and forwards the anchor.

Anchors travel as ``context``, the one tensor per micro-batch that Megatron threads through every layer and through
activation recompute with gradients. Between pipeline stages they ride beside the hidden states (``wire.py``).
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_exo.model.anchors import EmbeddingResidual, ExogenousAnchor, InternalAnchor, share_over_stages
from megatron_exo.model.attention import ExoSelfAttention
from megatron_exo.model.config import ExoTransformerConfig
from megatron_exo.model.wire import Wire


class ExoTransformerLayer(TransformerLayer):
    """A pre-norm layer of an ExoFormer.

    What the layer owns follows from its number: the source layer has the ``anchor``, mixed layers have coefficients
    in their attention, the first and last layer of a pipeline chunk open and close the wire; where the source travels,
    the first layer of each later stage has a copy of the ``anchor``. Nothing here knows the
    model around it, so the same layers fit any block that threads ``context``.
    """

    config: ExoTransformerConfig
    self_attention: ExoSelfAttention

    def __init__(self, config: ExoTransformerConfig, submodules: Any, layer_number: int = 1, **kwargs: Any) -> None:
        super().__init__(config, submodules, layer_number, **kwargs)
        exo = config.exo
        self.wire = Wire.of_layer(config, layer_number, self.layer_number, kwargs.get("vp_stage"), self.pg_collection)
        self.is_source = self.layer_number == exo.source_layer
        self.anchor: ExogenousAnchor | InternalAnchor | None = None
        if exo.anchor != "none" and (self.is_source or (self.wire.opens and self.wire.receives_source)):
            anchor_class = ExogenousAnchor if exo.is_exogenous else InternalAnchor
            self.anchor = anchor_class(config, self.self_attention.layout, self.pg_collection)
            if config.wires_source:
                share_over_stages(self.anchor, is_original=self.is_source)
        self.embedding_residual = EmbeddingResidual(config) if exo.control == "embedding-residual" else None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, context: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layer.

        Args:
            hidden_states: [s, b, h] ([s / tp, b, h] with sequence parallelism); in the first layer of a later
                pipeline chunk the wider tensor that came over the wire.
            context: the joined anchor [s, b, D / tp] (see :class:`Wire` for what may follow it), or the embeddings for
                the embedding-residual control; ``None`` before the source layer.

        Returns:
            The layer's output (on the last layer of a chunk: packed for the wire) and the context for the next layer.
        """
        exo, anchor = self.config.exo, self.anchor
        hidden_states, context = self.wire.unpack(hidden_states, context)
        if isinstance(anchor, ExogenousAnchor) and not (self.is_source and exo.anchor != "h0"):
            source = hidden_states if self.is_source else context
            assert source is not None, "a stage was sent no source of the anchor"
            context = self.wire.join(anchor(source), source)
        if self.embedding_residual is not None:
            context = hidden_states if self.is_source else context
            hidden_states = self.embedding_residual(hidden_states, context)

        if isinstance(anchor, InternalAnchor):
            with self.self_attention.publishing(anchor) as published:
                output, _ = super().forward(hidden_states, attention_mask, **kwargs)
            (context,) = published
        else:
            with self.self_attention.reading(self.wire.anchor(context)):
                output, _ = super().forward(hidden_states, attention_mask, **kwargs)
        if isinstance(anchor, ExogenousAnchor) and self.is_source and exo.anchor != "h0":
            context = self.wire.join(anchor(output), output)
        return self.wire.pack(output, context), context
