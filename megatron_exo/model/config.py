"""Megatron's transformer configuration with a point on ExoFormer's axes in it, and what the two do not allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from megatron_exo.config import ExoConfig, ExoConfigError
from megatron_exo.model.projections import HeadLayout

WIRES = ("anchors", "source")


@dataclass
class ExoTransformerConfig(TransformerConfig):
    """A ``TransformerConfig`` whose layers are ExoFormer layers.

    The gate, QK-norm and per-layer checkpoint keys follow from ``exo`` and are set here; what cannot carry anchors is
    refused.

    Raises:
        ExoConfigError: one line that says what is not supported, why, and what to use instead.
    """

    if TYPE_CHECKING:  # fields of the base class, which mypy does not see
        attention_output_gate: bool

    exo: ExoConfig = field(default_factory=ExoConfig)
    """The point on the axes of variation (SPEC of the paper's variants: :mod:`megatron_exo.variants`)."""
    exo_wire: str = "anchors"
    """What pipeline stages send beside the hidden states, one of :data:`WIRES`; it changes no result."""

    def __post_init__(self) -> None:
        if self.attention_output_gate and not self.exo.has_gate:
            raise ExoConfigError(
                "--attention-output-gate contradicts a variant without a gate; use --exo-gate elementwise"
            )
        for field_name, why in _UNSUPPORTED.items():
            if getattr(self, field_name, None):
                raise ExoConfigError(f"{field_name} is not supported with ExoFormer layers: {why}; leave it out")
        tp, groups = self.tensor_model_parallel_size, self.num_query_groups or self.num_attention_heads
        if groups % tp:  # Megatron would copy groups to ranks
            raise ExoConfigError(
                f"num_query_groups {groups} is not divisible by tensor_model_parallel_size {tp}: K/V anchors and gates "
                f"are split by whole query groups; use a tensor-parallel size that divides {groups}"
            )
        self.attention_output_gate = self.exo.has_gate
        self.qk_layernorm = True  # the paper's Q and K are always normalised after mixing
        # Layers may differ (source layer, unmixed layers), so checkpoints name each layer instead of stacking them;
        # for every variant, so that one reader serves all.
        self.hetereogenous_dist_checkpoint = True
        super().__post_init__()
        for problem in self._problems():
            raise ExoConfigError(problem)
        # Megatron sums the gradients of parameters marked ``pipeline_parallel`` over the stages.
        self.has_cond_embedder = self.wires_source

    @property
    def head_layout(self) -> HeadLayout:
        """The heads of the whole model (a rank's own part: divide the groups by tp)."""
        assert self.num_query_groups is not None
        assert self.kv_channels is not None
        return HeadLayout(self.num_query_groups, self.num_attention_heads // self.num_query_groups, self.kv_channels)

    @property
    def anchor_width(self) -> int:
        """Channels of the joined anchor over all tensor-parallel ranks."""
        return self.head_layout.total_width(self.exo.pathways)

    @property
    def wires_source(self) -> bool:
        """Whether stages send the anchor's source and each makes the anchor itself."""
        return self.exo_wire == "source" and self.exo.is_exogenous and self.pipeline_model_parallel_size > 1

    def _problems(self) -> Iterator[str]:
        """Every other reason why this configuration cannot be built, the most basic first."""
        exo = self.exo
        if exo.anchor != "none" and exo.first_mixed_layer > self.num_layers:
            yield (
                f"anchor {exo.anchor!r} is mixed from layer {exo.first_mixed_layer} on, but the model has "
                f"{self.num_layers}; use more layers or an earlier anchor"
            )
        if self.normalization != "RMSNorm":
            yield f"ExoFormer uses RMSNorm, not {self.normalization}; pass --normalization RMSNorm"
        if self.add_bias_linear or self.add_qkv_bias:
            yield "ExoFormer's projections have no biases; pass --disable-bias-linear and leave out --add-qkv-bias"
        if self.cuda_graph_impl != "none":
            yield (
                "CUDA graphs are not supported: the captured layer has no input for the anchor; "
                "use --cuda-graph-impl none"
            )
        if self.transformer_impl not in ("local", "transformer_engine"):
            yield f"transformer_impl {self.transformer_impl!r} is not supported; use local or transformer_engine"
        if self.exo_wire not in WIRES:
            yield f"exo_wire {self.exo_wire!r} is not one of {', '.join(WIRES)}"
        if exo.source_layer is None:
            return
        if self.distribute_saved_activations:
            yield "distribute_saved_activations would not split the anchor; leave out --distribute-saved-activations"
        if self.pipeline_model_parallel_size > 1:
            if self.fp32_residual_connection:
                yield (
                    "fp32 residual connections cannot share the wire between stages with anchors; "
                    "leave out --fp32-residual-connection"
                )
            for pp_rank, vp_stage, layers in self._layers_of_chunks():
                if layers:
                    continue
                yield (
                    f"pipeline stage {pp_rank} (virtual stage {vp_stage}) has no decoder layer, and anchors are handed "
                    "on by layers; give every stage at least one"
                )
            if self.exo_wire == "source":
                yield from self._source_wire_problems()

    def _source_wire_problems(self) -> Iterator[str]:
        if self.exo.anchor == "internal":
            yield (
                "--exo-wire source does not go with an internal anchor: it is made in layer 1's attention, which "
                "later stages do not have; use --exo-wire anchors"
            )
        if (self.virtual_pipeline_model_parallel_size or 1) > 1:
            yield (
                "--exo-wire source does not go with virtual pipeline stages: a rank would hold several copies of the "
                "anchor's matrices under one name in its checkpoint; use --exo-wire anchors"
            )
        if self.use_mup:
            yield (
                "--exo-wire source does not go with --use-mup: Megatron would scale the anchor's copies like "
                "embeddings; use --exo-wire anchors"
            )
        first = next(self._layers_of_chunks())[2]
        if self.exo.is_exogenous and first < self.exo.source_layer:  # type: ignore[operator]
            yield (
                f"--exo-wire source needs the anchor's source, layer {self.exo.source_layer}, on the first pipeline "
                f"stage, which has {first} layer; use --exo-wire anchors or fewer stages"
            )

    def _layers_of_chunks(self) -> Iterator[tuple[int, int, int]]:
        """Pipeline stage, virtual stage and number of decoder layers of every chunk, in the order of the model."""
        for vp_stage in range(self.virtual_pipeline_model_parallel_size or 1):
            for pp_rank in range(self.pipeline_model_parallel_size):
                layout = self.pipeline_model_parallel_layout
                if layout is not None:
                    layers = layout.layout[pp_rank][vp_stage].count(LayerType.decoder)
                else:
                    virtual = vp_stage if self.virtual_pipeline_model_parallel_size else None
                    layers = get_num_layers_to_build(self, virtual, pp_rank)
                yield pp_rank, vp_stage, layers


_UNSUPPORTED = {
    "multi_latent_attention": "latent attention has no per-head K and V projections to mix",
    "mtp_num_layers": "multi-token-prediction layers get no anchor",
    "flash_decode": "its decode path returns before the output gate and would give wrong results",
    "fused_single_qkv_rope": "it rotates Q and K before they can be mixed",
    "num_moe_experts": "the layer spec has a dense MLP",
    "qk_clip": "it rescales a packed QKV matrix without knowing its gate rows",
    "qk_l2_norm": "the paper's QK-norm is an RMSNorm with a learned gain",
    "test_mode": "it compares QK-norm biases, which RMSNorm does not have",
    "cpu_offloading": "the anchor is not among the offloaded activations",
    "fine_grained_activation_offloading": "the anchor is not among the offloaded activations",
    "overlap_moe_expert_parallel_comm": "its schedule calls the parts of a layer without the anchor",
    "fused_residual_rmsnorm": "the layer spec has a norm and a residual sum of their own",
    "use_transformer_engine_op_fuser": "the layer spec has a plain MLP",
    "hybrid_context_parallel": "sequences are cut over the context-parallel ranks in equal chunks",
    "experimental_attention_variant": "only softmax attention has the pathways that are mixed",
    "heterogeneous_block_specs": "all layers are ExoFormer layers",
    "layernorm_zero_centered_gamma": "gains are stored around one, as in the paper",
    "init_model_with_meta_device": "λ and gains are set on construction",
}
"""TransformerConfig fields that bypass or break the anchor's path, and why."""
