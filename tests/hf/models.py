"""Small Hugging Face models of every variant, in whose weights each term counts, and the plain model beside them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron_exo.config import ExoConfig
from megatron_exo.convert.hugging_face import hf_config, hf_mapping
from megatron_exo.convert.mapping import export_state
from megatron_exo.hf import ExoFormerConfig, ExoFormerForCausalLM
from megatron_exo.sizes import ModelSizes
from megatron_exo.variants import VARIANTS
from tests.golden_values import plain_sizes
from tests.plain_reference import PlainExoFormer, random_state

SIZES = ModelSizes(
    num_layers=3, hidden_size=32, num_attention_heads=4, num_query_groups=4, kv_channels=8, ffn_hidden_size=64,
    vocab_size=64, seq_length=64,
)  # fmt: skip
GROUPED = dataclasses.replace(SIZES, num_query_groups=2, kv_channels=16)
"""Half as many K and V heads as Q and G heads, and heads that together are wider than the hidden size."""
TIED = dataclasses.replace(SIZES, tied_embeddings=True)

_EXO = VARIANTS["e-exoformer"].exo
_DYNAMIC = VARIANTS["dynamic-e-exoformer"].exo
UNNAMED = {
    "base-qk-bias": ExoConfig(control="qk-bias"),
    "scalar-embedding-residual": ExoConfig(control="embedding-residual", granularity="scalar"),
    "dynamic-h-qkv": ExoConfig(
        anchor="h1", pathways="qkv", anchor_norm="qk", post_norm="v", granularity="headwise", mixing="dynamic"
    ),
    "narrow-dynamic-vg": _DYNAMIC.replace(pathways="vg", anchor_norm="v", post_norm="g", dynamic_hidden_size=5),
    "internal-qg": VARIANTS["e-nuresformer"].exo.replace(pathways="qg", anchor_norm="q"),
    "value-from-h2": ExoConfig(anchor="h2", pathways="v"),
    "without-anchor-of-kv": _EXO.replace(drop_anchor="kv"),
    "without-current-of-qg": _DYNAMIC.replace(drop_current="qg", drop_anchor="v"),
}
VARIANTS_AND_MORE: dict[str, ExoConfig] = {name: variant.exo for name, variant in VARIANTS.items()} | UNNAMED
SOME = ["base", "e-nuresformer", "dynamic-h-exoformer", "dynamic-e-exoformer-h2", "gated-embedding-residual"]
"""One for each way in which a layer gets what it shares with others."""


def our_state(exo: ExoConfig, sizes: ModelSizes = SIZES) -> dict[str, Tensor]:
    return random_state(exo, plain_sizes(sizes))


def plain_model(exo: ExoConfig, sizes: ModelSizes = SIZES) -> PlainExoFormer:
    return PlainExoFormer(exo, plain_sizes(sizes))


def empty_model(
    exo: ExoConfig, sizes: ModelSizes = SIZES, attention: str = "sdpa", **fields: Any
) -> ExoFormerForCausalLM:
    config = ExoFormerConfig(**hf_config(exo, sizes) | fields)
    return ExoFormerForCausalLM._from_config(config, attn_implementation=attention).eval()


def load(model: ExoFormerForCausalLM, state: dict[str, Tensor]) -> ExoFormerForCausalLM:
    """Fill the model with a state that has all of its parameters; a tied head follows its embedding."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.config.tie_word_embeddings else [])
    return model


def hf_model(
    name: str, sizes: ModelSizes = SIZES, attention: str = "sdpa", dtype: torch.dtype = torch.float32, **fields: Any
) -> ExoFormerForCausalLM:
    """The variant with the weights of :func:`plain_model`, in evaluation mode."""
    exo = VARIANTS_AND_MORE[name]
    state = export_state(hf_mapping(exo, sizes), our_state(exo, sizes))
    return load(empty_model(exo, sizes, attention, **fields), state).to(dtype)


def tokens(*shape: int, seed: int = 0, vocab_size: int = 64) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))
