"""What ExoFormer layers do not go together with is refused when the configuration is made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_exo.config import ExoConfigError
from megatron_exo.model.config import _UNSUPPORTED, ExoTransformerConfig
from megatron_exo.sizes import ModelSizes
from megatron_exo.standalone import transformer_config
from megatron_exo.variants import VARIANTS

SIZES = ModelSizes(4, 64, 4, 4, 16, 128, vocab_size=64, seq_length=32)
NUMBERS: dict[str, Any] = {
    "mtp_num_layers": 1,
    "num_moe_experts": 2,
    "experimental_attention_variant": "gated_delta_net",
}
"""Values of the unsupported fields that are no switches."""


def make(variant: str = "e-exoformer", **fields: Any) -> ExoTransformerConfig:
    return transformer_config(VARIANTS[variant].exo, SIZES, torch.float32, **fields)


@pytest.mark.parametrize("field", _UNSUPPORTED)
def test_what_bypasses_the_anchor_is_refused_with_its_reason(field: str) -> None:
    reason = _UNSUPPORTED[field]
    with pytest.raises(ExoConfigError) as refusal:
        make(**{field: NUMBERS.get(field, True)})
    assert str(refusal.value) == f"{field} is not supported with ExoFormer layers: {reason}; leave it out"


def test_every_unsupported_field_is_one_of_megatrons() -> None:
    assert set(_UNSUPPORTED) <= {field.name for field in dataclasses.fields(ExoTransformerConfig)}


GUARDS: list[tuple[dict[str, Any], str]] = [
    (
        {"variant": "base", "attention_output_gate": True},
        "--attention-output-gate contradicts a variant without a gate",
    ),
    (
        {"tensor_model_parallel_size": 3},
        "num_query_groups 4 is not divisible by tensor_model_parallel_size 3.* divides 4",
    ),
    (
        {"tensor_model_parallel_size": 4, "num_query_groups": 2},
        "num_query_groups 2 is not divisible by tensor_model_parallel_size 4: K/V anchors and gates are split by whole",
    ),
    ({"variant": "e-exoformer-h1", "num_layers": 1}, "'h1' is mixed from layer 2 on, but the model has 1; use more"),
    ({"variant": "dynamic-e-exoformer-h2", "num_layers": 2}, "'h2' is mixed from layer 3 on, but the model has 2"),
    ({"variant": "e-nuresformer", "num_layers": 1}, "'internal' is mixed from layer 2 on, but the model has 1"),
    ({"normalization": "LayerNorm"}, "uses RMSNorm, not LayerNorm; pass --normalization RMSNorm"),
    ({"add_bias_linear": True}, "have no biases; pass --disable-bias-linear and leave out --add-qkv-bias"),
    ({"add_qkv_bias": True}, "have no biases"),
    ({"cuda_graph_impl": "local"}, "CUDA graphs are not supported.* use --cuda-graph-impl none"),
    ({"cuda_graph_impl": "transformer_engine"}, "CUDA graphs are not supported"),
    ({"transformer_impl": "inference_optimized"}, "'inference_optimized' is not supported; use local or transformer_e"),
    ({"distribute_saved_activations": True}, "would not split the anchor; leave out --distribute-saved-activations"),
    (
        {"pipeline_model_parallel_size": 2, "fp32_residual_connection": True},
        "fp32 residual connections cannot share the wire between stages with anchors; leave out --fp32-residual",
    ),
    (
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|ttttL"},
        r"pipeline stage 0 \(virtual stage 0\) has no decoder layer.* give every stage at least one",
    ),
    (
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Et|t|tt|L",
        },
        r"pipeline stage 1 \(virtual stage 1\) has no decoder layer",
    ),
]


@pytest.mark.parametrize(("fields", "message"), GUARDS, ids=[message[:40] for _, message in GUARDS])
def test_what_does_not_fit_is_refused_with_what_to_use_instead(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ExoConfigError, match=message):
        make(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"distribute_saved_activations": True},
        {"pipeline_model_parallel_size": 2, "fp32_residual_connection": True},
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|ttttL"},
    ],
)
def test_without_an_anchor_the_wire_is_megatrons_and_its_options_are_free(fields: dict[str, Any]) -> None:
    make("gated", **fields)
    with pytest.raises(ExoConfigError):
        make("gated-embedding-residual", **fields)  # the embeddings travel like an anchor


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_sets_what_follows_from_it(variant: str) -> None:
    config, exo = make(variant), VARIANTS[variant].exo
    assert config.attention_output_gate is exo.has_gate
    assert config.qk_layernorm
    assert config.hetereogenous_dist_checkpoint


@pytest.mark.parametrize(("variant", "width"), [("e-exoformer", 4 * 64), ("e-exoformer-vg", 2 * 64), ("gated", 0)])
def test_the_anchor_is_as_wide_as_the_mixed_projections(variant: str, width: int) -> None:
    assert make(variant).anchor_width == width


def test_with_grouped_queries_key_and_value_anchors_are_narrower() -> None:
    assert make(num_query_groups=2).anchor_width == 2 * 64 + 2 * 32
