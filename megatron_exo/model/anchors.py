"""Anchors: the second representation of the tokens that every mixed layer reads and none writes.

An anchor is computed once per micro-batch, in the layer that is its source, and travels from layer to layer as one
joined tensor [s, b, D / tp]: the mixed pathways of ``HeadLayout.join``, heads sharded over the tensor-parallel group.
"""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_exo.model.backend import get_backend
from megatron_exo.model.config import ExoTransformerConfig
from megatron_exo.model.norm import head_gain, per_head_rms_norm
from megatron_exo.model.projections import HeadLayout, in_packed_order


class _Anchor(MegatronModule):
    """Per-head norms with gains ``{q,k,v,g}_norm`` [head_dim] (replicated), then joined."""

    def __init__(
        self, config: ExoTransformerConfig, layout: HeadLayout, pg_collection: ProcessGroupCollection, normed: str
    ) -> None:
        super().__init__(config=config)
        self.layout = layout
        self.pg_collection = pg_collection
        self.pathways = in_packed_order(config.exo.pathways)
        for pathway in normed:
            self.register_parameter(f"{pathway}_norm", head_gain(layout.head_dim, config))

    def _normalise_and_join(self, parts: dict[str, Tensor]) -> Tensor:
        eps = self.config.layernorm_epsilon
        normed = {}
        for pathway in self.pathways:
            gain = getattr(self, f"{pathway}_norm", None)
            part = parts[pathway]
            normed[pathway] = part if gain is None else per_head_rms_norm(part, gain, eps, self.pg_collection)
        return self.layout.join(normed)


class ExogenousAnchor(_Anchor):
    """S_anc = H W_anc^S with matrices of its own, H being the embeddings or an early layer's output (paper §3.2).

    ``linear_qkv.weight`` [sum of pathway widths, hidden_size], column-parallel, rows packed per query group as in
    a layer's ``linear_qkv`` (and so named, for Megatron tells it by that name when it splits the matrix).
    """

    def __init__(self, config: ExoTransformerConfig, layout: HeadLayout, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config, layout, pg_collection, normed=config.exo.anchor_norm)
        self.linear_qkv = get_backend(config.transformer_impl).column_parallel_linear()(
            config.hidden_size,
            layout.total_width(self.pathways) * pg_collection.tp.size(),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            tp_group=pg_collection.tp,
        )
        layout.state_on(self.linear_qkv.weight, self.pathways)
        if config.exo.anchor_weights == "frozen":
            self.linear_qkv.weight.requires_grad_(False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[s, b, h] (or [s / tp, b, h] with sequence parallelism) → the joined anchor [s, b, D / tp]."""
        packed, _ = self.linear_qkv(hidden_states)
        return self._normalise_and_join(self.layout.unpack_groups(packed, self.pathways))


def share_over_stages(anchor: torch.nn.Module, *, is_original: bool) -> None:
    """Mark parameters of which each pipeline stage has a copy, so that Megatron keeps the copies the same.

    Their gradients are summed over the stages (``pipeline_parallel``), after the distributed optimizer has reduced
    them in buckets of their own, cut alike on every stage (``shared_embedding``); norms count the original alone.
    """
    for parameter in anchor.parameters():
        parameter.pipeline_parallel = True  # type: ignore[attr-defined]
        parameter.shared_embedding = True  # type: ignore[attr-defined]
        parameter.shared = not is_original  # type: ignore[attr-defined]


class InternalAnchor(_Anchor):
    """S_anc = layer 1's own projections ("NuResFormer", ResFormer): Q and K after its QK-norm, V and G normed here."""

    def __init__(self, config: ExoTransformerConfig, layout: HeadLayout, pg_collection: ProcessGroupCollection) -> None:
        normed = "".join(pathway for pathway in config.exo.anchor_norm if pathway in "vg")
        super().__init__(config, layout, pg_collection, normed=normed)

    def forward(self, raw: dict[str, Tensor], qk_normed: dict[str, Tensor]) -> Tensor:
        """Join the anchor.

        Args:
            raw: component → [s, b, heads / tp, head_dim], layer 1's projections before any norm.
            qk_normed: ``q`` and ``k`` after layer 1's QK-norm, before RoPE; taken where the anchor norm covers them.
        """
        anchor_norm = self.config.exo.anchor_norm
        return self._normalise_and_join(
            {p: qk_normed[p] if p in "qk" and p in anchor_norm else raw[p] for p in self.pathways}
        )


class EmbeddingResidual(MegatronModule):
    """The control that has no anchor: ``x + w ⊙ H_0`` at the input of each layer; w [hidden_size] or [1], from zero."""

    def __init__(self, config: ExoTransformerConfig) -> None:
        super().__init__(config=config)
        size = 1 if config.exo.granularity == "scalar" else config.hidden_size
        self.weight = torch.nn.Parameter(torch.zeros(size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor, embeddings: Tensor) -> Tensor:
        """Both [s, b, h], or [s / tp, b, h] with sequence parallelism."""
        return hidden_states + self.weight * embeddings
