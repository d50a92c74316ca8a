"""ExoFormer models of transformers (``megatron_exo.hf``) against ours: their configuration and their weights.

Nothing here imports transformers: a configuration is what its ``config.json`` holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_exo.config import ExoConfig
from megatron_exo.convert.mapping import (
    ConversionError,
    Direct,
    Flattened,
    PackedProjections,
    ParameterMapping,
    Shape,
    per_layer,
)
from megatron_exo.sizes import ModelSizes

MODEL_TYPE = "exoformer"
_LONGEST = 40
"""Characters of a choice in a configuration; no choice has so many."""
_SIZES = {
    # their name: ours
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "intermediate_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "seq_length",
    "rms_norm_eps": "layernorm_epsilon",
    "tie_word_embeddings": "tied_embeddings",
}


def hf_config(exo: ExoConfig, sizes: ModelSizes) -> dict[str, Any]:
    """The arguments of the ``ExoFormerConfig`` that describes a model of ours."""
    return {
        **{theirs: getattr(sizes, ours) for theirs, ours in _SIZES.items()},
        "rope_parameters": {"rope_type": "default", "rope_theta": float(sizes.rotary_base)},
        **dataclasses.asdict(exo),
    }


def from_hf_config(config: Mapping[str, Any]) -> tuple[ExoConfig, ModelSizes]:
    """The inverse of :func:`hf_config`, for the content of a ``config.json``.

    Raises:
        ConversionError: the configuration of another kind of model, one that lacks fields or has some of a wrong type,
            or rotary embeddings that our model does not have.
        ExoConfigError: axes that contradict each other.
    """
    if config.get("model_type", MODEL_TYPE) != MODEL_TYPE:
        raise ConversionError(
            f"the configuration is that of a {repr(config['model_type'])[:_LONGEST]} model, not of an {MODEL_TYPE}"
        )
    fields = {field.name: type(field.default) for field in dataclasses.fields(ExoConfig)}
    rope = _typed(config, "rope_parameters", dict)
    if rope.get("rope_type", "default") != "default":
        raise ConversionError(f"rope_type is {repr(rope['rope_type'])[:_LONGEST]}; our models have only 'default'")
    types = {field.name: field.type for field in dataclasses.fields(ModelSizes)}
    kinds = {"int": int, "float": float, "bool": bool}
    sizes = {ours: _typed(config, theirs, kinds[str(types[ours])]) for theirs, ours in _SIZES.items()}
    return (
        ExoConfig(**{name: _typed(config, name, kind) for name, kind in fields.items()}),
        ModelSizes(**sizes, rotary_base=_typed(rope, "rope_theta", float)),
    )


def hf_mapping(exo: ExoConfig, sizes: ModelSizes) -> list[ParameterMapping]:
    """Every parameter of an ``ExoFormerForCausalLM`` against ours; a tied head is no parameter of its own."""
    h, ffn, head_dim = sizes.hidden_size, sizes.ffn_hidden_size, sizes.kv_channels
    ours, attention = "decoder.layers.*", "decoder.layers.*.self_attention"
    theirs, their_attention = "model.layers.*", "model.layers.*.self_attn"

    def lambda_shape(component: str) -> Shape:
        heads = sizes.num_heads(component)
        return {"scalar": (1,), "headwise": (heads, 1), "elementwise": (heads, head_dim)}[exo.granularity]

    def packed(our_name: str, their_prefix: str, components: str) -> ParameterMapping:
        kept = "".join(c for c in exo.components if c in components)
        names = tuple(f"{their_prefix}.{c}_proj.weight" for c in components)
        return PackedProjections(our_name, names, sizes, stored=components, kept=kept)

    components = "".join(c for c in "qkvg" if c in exo.components)
    table: list[ParameterMapping] = [
        Direct("embedding.word_embeddings.weight", "model.embed_tokens.weight", (sizes.vocab_size, h)),
        Direct("decoder.final_layernorm.weight", "model.norm.weight", (h,)),
    ]
    if not sizes.tied_embeddings:
        table += [Direct("output_layer.weight", "lm_head.weight", (sizes.vocab_size, h))]

    layer: list[ParameterMapping] = [
        Direct(f"{ours}.input_layernorm.weight", f"{theirs}.input_layernorm.weight", (h,)),
        packed(f"{attention}.linear_qkv.weight", their_attention, components),
        Direct(f"{attention}.q_layernorm.weight", f"{their_attention}.q_norm.weight", (head_dim,)),
        Direct(f"{attention}.k_layernorm.weight", f"{their_attention}.k_norm.weight", (head_dim,)),
        Direct(
            f"{attention}.linear_proj.weight",
            f"{their_attention}.o_proj.weight",
            (h, sizes.num_attention_heads * head_dim),
        ),
        Direct(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.post_attention_layernorm.weight", (h,)),
        Stacked(
            f"{ours}.mlp.linear_fc1.weight",
            (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight"),
            (ffn, h),
        ),
        Direct(f"{ours}.mlp.linear_fc2.weight", f"{theirs}.mlp.down_proj.weight", (h, ffn)),
    ]
    if exo.control == "qk-bias":
        layer += [
            Direct(f"{attention}.mixing.bias_{c}", f"{their_attention}.{c}_proj.bias", (sizes.num_heads(c) * head_dim,))
            for c in "qk"
        ]
    if exo.control == "embedding-residual":
        size = 1 if exo.granularity == "scalar" else h
        layer += [Direct(f"{ours}.embedding_residual.weight", f"{theirs}.embedding_residual", (size,))]
    table += per_layer(range(sizes.num_layers), layer)

    mixed: list[ParameterMapping] = [
        Flattened(f"{attention}.mixing.lambda_{c}{i}", f"{their_attention}.mixing.lambda_{c}{i}", lambda_shape(c))
        for c in exo.pathways
        for i in (1, 2)
    ]
    mixed += [
        Direct(f"{attention}.mixing.{c}_post_norm", f"{their_attention}.mixing.{c}_post_norm.weight", (head_dim,))
        for c in exo.post_norm
    ]
    if exo.is_dynamic:
        width, outputs = exo.dynamic_hidden_size, exo.num_dynamic_outputs
        shapes = {"fc1.weight": (width, h), "fc2.weight": (outputs, width), "fc2.bias": (outputs,)}
        mixed += [
            Direct(f"{attention}.dynamic_mixing.{name}", f"{their_attention}.dynamic_mixing.{name}", shape)
            for name, shape in shapes.items()
        ]
    table += per_layer([n for n in range(sizes.num_layers) if exo.mixes(n + 1)], mixed)

    if exo.is_exogenous:
        assert exo.source_layer is not None
        our_anchor = f"decoder.layers.{exo.source_layer - 1}.anchor"
        table += [packed(f"{our_anchor}.linear_qkv.weight", "model.anchor", exo.pathways)]
        table += [
            Direct(f"{our_anchor}.{c}_norm", f"model.anchor.{c}_norm.weight", (head_dim,)) for c in exo.anchor_norm
        ]
    elif exo.anchor == "internal":
        # Q and K anchors have the first layer's QK-norm.
        table += [
            Direct(f"decoder.layers.0.anchor.{c}_norm", f"model.layers.0.self_attn.anchor.{c}_norm.weight", (head_dim,))
            for c in exo.anchor_norm
            if c in "vg"
        ]
    return table


@dataclass(frozen=True)
class Stacked(ParameterMapping):
    """Theirs are several tensors of ``shape``, ours the same rows one below the other."""

    shape: Shape

    def their_shapes(self) -> Sequence[Shape]:
        return [self.shape] * len(self.their_names)

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors))

    def to_theirs(self, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.chunk(len(self.their_names))


def _typed(config: Mapping[str, Any], name: str, kind: type) -> Any:
    """The field as ``kind``; a whole number will do for a float."""
    if name not in config:
        raise ConversionError(f"the configuration lacks {name}")
    value = config[name]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, str) and len(value) > _LONGEST):
        raise ConversionError(f"the configuration has {name}={repr(value)[:_LONGEST]}, which is no {kind.__name__}")
    return value
