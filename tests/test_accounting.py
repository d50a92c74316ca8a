"""Counts of parameters and operations, against the real model and against hand counts."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections import Counter

import pytest
import torch

from megatron_exo.accounting import flops_per_token, parameters, training_flops_per_token
from megatron_exo.config import ExoConfig
from megatron_exo.presets import matching_of
from megatron_exo.sizes import ModelSizes
from megatron_exo.variants import VARIANTS
from tests.ranks import run_on_ranks

TOY = ModelSizes(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    ffn_hidden_size=64,
    vocab_size=64,
    seq_length=12,
)

AUTHOR_COUNTS = {
    "base": 35088,
    "gated": 38160,
    "s-nuresformer": 38192,
    "s-nuresformer-qk-norm": 38176,
    "h-nuresformer": 38240,
    "e-nuresformer": 38688,
    "s-exoformer": 42312,
    "h-exoformer": 42384,
    "e-exoformer": 43056,
    "e-exoformer-no-norm": 43024,
    "dynamic-e-nuresformer": 39984,
    "dynamic-s-exoformer": 44256,
    "dynamic-h-exoformer": 44328,
    "dynamic-e-exoformer": 45000,
}
"""Sizes of the author's implementation at the toy sizes."""

PART_OF_PARAMETER = {
    r"embedding\.": "embedding",
    r"output_layer\.": "head",
    r".*self_attention\.linear_proj\.": "output_projection",
    r".*\.mlp\.": "mlp",
    r".*\.anchor\.": "anchor",
    r".*self_attention\.mixing\.|.*embedding_residual\.": "mixing",
    r".*dynamic_mixing\.": "dynamic_mixing",
    r".*layernorm\.": "norms",
}


def build_and_count(exo: ExoConfig, sizes: ModelSizes) -> dict[str, int]:
    """Build the real model and sort its parameters into parts by their names."""
    from megatron_exo.model.config import ExoTransformerConfig
    from megatron_exo.model.gpt import ExoGPTModel
    from megatron_exo.model.specs import exo_block_spec

    config = ExoTransformerConfig(
        **sizes.transformer_fields(),
        exo=exo,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        transformer_impl="local",
    )
    model = ExoGPTModel(
        config=config,
        transformer_layer_spec=exo_block_spec(config, None),
        vocab_size=sizes.vocab_size,
        true_vocab_size=sizes.vocab_size,
        max_sequence_length=sizes.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=sizes.tied_embeddings,
    )
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        part = next((part for pattern, part in PART_OF_PARAMETER.items() if re.match(pattern, name)), None)
        if part is not None:
            parts[part] += parameter.numel()
        else:  # the packed matrix: rows of Q, (G,) K and V
            assert name.endswith("self_attention.linear_qkv.weight"), name
            gate = sizes.width("g") * sizes.hidden_size if exo.has_gate else 0
            parts["gate"] += gate
            parts["projections"] += parameter.numel() - gate
    return dict(parts)


GROUPED = dataclasses.replace(TOY, num_query_groups=2)
Case = tuple[ExoConfig, ModelSizes]
CASES: dict[str, Case] = {name: (variant.exo, TOY) for name, variant in VARIANTS.items()}
CASES |= {
    f"{name}, two query groups": (VARIANTS[name].exo, GROUPED)
    for name in ("gated", "dynamic-e-exoformer", "dynamic-h-nuresformer", "e-exoformer-postnorm-vg", "gated-qk-bias")
}
CASES |= {
    "tied embeddings": (VARIANTS["e-exoformer"].exo, dataclasses.replace(TOY, tied_embeddings=True)),
    "heads wider than hidden": (VARIANTS["e-exoformer"].exo, dataclasses.replace(TOY, kv_channels=16)),
    "dynamic without a gate": (ExoConfig(anchor="h0", pathways="qkv", anchor_norm="qkv", mixing="dynamic"), TOY),
    "scalar residual": (ExoConfig(gate="elementwise", control="embedding-residual", granularity="scalar"), TOY),
}
CASES |= {
    f"{name}, 20M, matched by FFN width": (exo := VARIANTS[name].exo, matching_of("20M", match="depth").solve(exo))
    for name in ("base", "dynamic-e-nuresformer", "dynamic-e-exoformer")
}


def count_real_models(cases: list[Case]) -> list[dict[str, int]]:
    """On one rank: what the parameters of each model are."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    return [build_and_count(exo, sizes) for exo, sizes in cases]


@pytest.fixture(scope="module")
def real_counts() -> dict[str, dict[str, int]]:
    (counts,) = run_on_ranks(1, count_real_models, list(CASES.values()))
    return dict(zip(CASES, counts, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_every_part_has_as_many_parameters_as_in_the_real_model(
    case: str, real_counts: dict[str, dict[str, int]]
) -> None:
    exo, sizes = CASES[case]
    counted = {part: count for part, count in parameters(exo, sizes).items() if count}
    assert counted == {part: count for part, count in real_counts[case].items() if count}


@pytest.mark.parametrize(("name", "count"), AUTHOR_COUNTS.items())
def test_toy_models_are_as_large_as_the_authors(name: str, count: int) -> None:
    assert sum(parameters(VARIANTS[name].exo, TOY).values()) == count


def test_the_1b_dynamic_exoformer_has_the_published_number_of_parameters() -> None:
    sizes = dataclasses.replace(matching_of("1B").sizes, vocab_size=57_601)
    d = 1536
    layer = 11 * d**2 + (2 * d + 2 * 96) + 8 * d + (d * 16 + 16 * 8 + 8)
    by_hand = 2 * 57_601 * d + d + 32 * layer + 4 * d**2 + 4 * 96
    assert sum(parameters(VARIANTS["dynamic-e-exoformer"].exo, sizes).values()) == by_hand == 1_018_150_016
    assert f"{sum(parameters(VARIANTS['dynamic-e-exoformer'].exo, sizes).values()) / 1e6:.1f}" == "1018.2"


# Of 450M, d = 1024 in 16 heads of 64, by hand. Embedding and head; per layer the square matrices (Q, K, V, output, and
# with a gate G), the FFN's three of 2 d², two norms of d and those of Q and K; the last norm.
_D = 1024
_ENDS = 2 * 50_257 * _D + _D
_NORMS = 2 * _D + 2 * 64
_ANCHOR = 4 * _D**2 + 4 * 64  # Q, K, V, G matrices and their norms' gains
_LAMBDA = 2 * 4 * _D  # two per channel of Q, K, V, G
_DYNAMIC = _D * 16 + 16 * 8 + 8
HAND_COUNTS = {
    "base": _ENDS + 32 * (4 * _D**2 + 6 * _D**2 + _NORMS),
    "gated": _ENDS + 29 * (5 * _D**2 + 6 * _D**2 + _NORMS),
    "e-exoformer": _ENDS + 28 * (5 * _D**2 + 6 * _D**2 + _NORMS + _LAMBDA) + _ANCHOR,
    "dynamic-e-exoformer": _ENDS + 28 * (5 * _D**2 + 6 * _D**2 + _NORMS + _LAMBDA + _DYNAMIC) + _ANCHOR,
}


@pytest.mark.parametrize(("name", "count"), HAND_COUNTS.items())
def test_models_of_450m_are_as_large_as_counted_by_hand(name: str, count: int) -> None:
    exo = VARIANTS[name].exo
    assert sum(parameters(exo, matching_of("450M").solve(exo)).values()) == count


def test_operations_at_450m_agree_with_a_count_by_hand() -> None:
    exo = VARIANTS["gated"].exo
    layer = 2 * 11 * _D**2 + 2 * 2 * _D * (2048 + 1) / 2  # matrices, and causal scores and values
    assert sum(flops_per_token(exo, matching_of("450M").solve(exo)).values()) == 29 * layer + 2 * _D * 50_257


def test_operations_agree_with_a_count_by_hand() -> None:
    # Two query groups: Q and G are 32 channels wide, K and V 16; 96 in all.
    assert flops_per_token(VARIANTS["dynamic-e-exoformer"].exo, GROUPED) == {
        "projections": 3 * 2 * 32 * (32 + 16 + 16),
        "gate": 3 * 2 * 32 * 32,
        "output_projection": 3 * 2 * 32 * 32,
        "mlp": 3 * 2 * (32 * 128 + 64 * 32),
        # 12 tokens see 1 + 2 + ... + 12 = 78 keys: 6.5 each, with 2 x 8 operations per head for the score, and again
        # for the value.
        "attention": 3 * 4 * (6.5 * 2 * 8 + 6.5 * 2 * 8),
        "anchor": 2 * 32 * 96,
        "mixing": 3 * (3 * 96 + 2 * 96),
        "dynamic_mixing": 3 * 2 * (32 * 16 + 16 * 8),
        "head": 2 * 32 * 64,
    }


def test_an_internal_anchor_is_free_and_its_source_layer_is_not_mixed() -> None:
    internal = flops_per_token(VARIANTS["e-nuresformer"].exo, TOY)
    assert internal["anchor"] == 0
    assert internal["mixing"] == 2 * 3 * 128


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("base", 0),
        ("resformer", 2 * 3 * 32),  # two mixed layers, V alone
        ("dynamic-s-exoformer", 3 * (3 * 128 + 8)),  # γ λ is eight numbers
        ("dynamic-h-exoformer", 3 * (3 * 128 + 8 * 4)),  # and eight per head
        ("gated-qk-bias", 3 * 64),
        ("gated-embedding-residual", 3 * 2 * 32),
    ],
)
def test_mixing_operations_follow_the_variant(name: str, operations: int) -> None:
    assert flops_per_token(VARIANTS[name].exo, TOY)["mixing"] == operations


def test_training_costs_three_forward_passes() -> None:
    exo = VARIANTS["e-exoformer"].exo
    assert training_flops_per_token(exo, TOY) == 3 * sum(flops_per_token(exo, TOY).values())


def test_at_450m_anchor_and_mixing_cost_about_the_published_one_percent() -> None:
    sizes = ModelSizes(28, 1024, 16, 16, 64, 2048, vocab_size=50_257, seq_length=2048)
    forward = flops_per_token(VARIANTS["dynamic-e-exoformer"].exo, sizes)
    extra = forward["anchor"] + forward["mixing"] + forward["dynamic_mixing"]
    # The paper says about 1.3%, without the formula behind it.
    assert 0.010 < extra / (sum(forward.values()) - extra) < 0.015


def test_counting_does_not_import_torch() -> None:
    code = "import sys, megatron_exo.accounting, megatron_exo.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
