"""Self-attention whose projections are mixed with the anchor before QK-norm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron_exo.model.anchors import InternalAnchor
from megatron_exo.model.config import ExoTransformerConfig
from megatron_exo.model.mixing import DynamicMixing, ProjectionMixing, QKBias
from megatron_exo.model.projections import HeadLayout, in_packed_order


class ExoSelfAttention(SelfAttention):
    """Megatron's self-attention with one method replaced: project → **mix** → QK-norm; RoPE and the rest follow there.

    Key and value caches hold what this method returns, so they hold mixed projections and do not grow.
    """

    config: ExoTransformerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        exo = self.config.exo
        self.layout = HeadLayout(
            num_groups=self.num_query_groups_per_partition,
            heads_per_group=self.num_attention_heads_per_partition // self.num_query_groups_per_partition,
            head_dim=self.hidden_size_per_attention_head,
        )
        self.layout.state_on(self.linear_qkv.weight, exo.components)
        self.mixing: ProjectionMixing | QKBias | None = None
        self.dynamic_mixing: DynamicMixing | None = None
        if exo.mixes(self.layer_number):
            self.mixing = ProjectionMixing(self.config, self.layout, self.pg_collection)
            if exo.is_dynamic:
                self.dynamic_mixing = DynamicMixing(self.config, self.pg_collection)
        elif exo.control == "qk-bias":
            self.mixing = QKBias(self.config, self.layout, self.pg_collection)
        self._anchors: Tensor | None = None
        self._internal_anchor: InternalAnchor | None = None
        self._published: Tensor | None = None

    @contextmanager
    def reading(self, anchors: Tensor | None) -> Iterator[None]:
        """Lend the joined anchor [s, b, D / tp] to the one forward call inside the block.

        Megatron's layer hands its attention no tensor besides the hidden states. A loan for one call is safe under
        recompute, which enters the layer, and this block with it, again.
        """
        self._anchors = anchors
        try:
            yield
        finally:
            self._anchors = None

    @contextmanager
    def publishing(self, anchor: InternalAnchor) -> Iterator[list[Tensor]]:
        """Collect the joined internal anchor of the one forward call inside the block into the yielded list."""
        published: list[Tensor] = []
        self._internal_anchor = anchor
        try:
            yield published
            assert self._published is not None
            published.append(self._published)
        finally:
            self._internal_anchor = self._published = None

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, ...]:
        """Project, mix with the anchor, normalise Q and K.

        Args:
            hidden_states: the normed input, [s, b, h] ([s / tp, b, h] with sequence parallelism).

        Returns:
            Q, K, V and, with a gate, G: [s, b, heads / tp, head_dim] each.
        """
        exo = self.config.exo
        packed, _ = self.linear_qkv(hidden_states)
        projections = raw = self.layout.unpack_groups(packed, exo.components)
        if isinstance(self.mixing, ProjectionMixing):
            assert self._anchors is not None, f"layer {self.layer_number} mixes but was given no anchor"
            anchors = self.layout.split(self._anchors, in_packed_order(exo.pathways))
            gammas = self.dynamic_mixing(hidden_states) if self.dynamic_mixing is not None else {}
            projections = self.mixing(raw, anchors, gammas)
        elif self.mixing is not None:
            projections = self.mixing(raw)

        query, key = self.q_layernorm(projections["q"]), self.k_layernorm(projections["k"])
        if self._internal_anchor is not None:
            self._published = self._internal_anchor(raw, {"q": query, "k": key})
        rest = (projections["v"], projections["g"]) if output_gate else (projections["v"],)
        return (query, key, *rest)
