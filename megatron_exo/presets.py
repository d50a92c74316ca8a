"""Sizes and recipes as data: what ``--preset`` fills in, unless the command line says otherwise.

To add a preset: add one entry to ``_PRESETS``; keys are Megatron's argument destinations. Numbers of the two families
are those of arXiv 2601.08131; where the paper gives none, the description says what was chosen. The vocabulary is
not part of a preset: it belongs to the tokenizer.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_exo.accounting import ModelSizes, parameters
from megatron_exo.config import ExoConfig, ExoConfigError
from megatron_exo.variants import get_variant

GPT2_VOCAB_SIZE = 50_257
"""The vocabulary with which the families' models are compared in size."""

_DEPTH_TOLERANCE = 1e-3
"""Part of the reference's parameters by which a variant may exceed it: coefficients and gains, never a layer (2.3% of
the smallest family), must not cost a layer."""


@dataclass(frozen=True)
class Preset:
    """A size with its recipe."""

    name: str
    description: str
    arguments: Mapping[str, object]
    """Megatron argument destination → value."""
    depth_reference: str | None = None
    """The variant that ``num_layers`` holds for; others get the depth that matches its parameters. ``None``: every
    variant has ``num_layers`` layers."""


def _wsd(train_iters: int, lr: float, min_lr: float, warmup: int) -> dict[str, object]:
    """Warm-up, a flat stretch, and the last 20% linearly down to ``min_lr``."""
    return {
        "train_iters": train_iters,
        "lr": lr,
        "min_lr": min_lr,
        "lr_decay_style": "WSD",
        "lr_warmup_iters": warmup,
        "lr_decay_iters": train_iters,
        "lr_wsd_decay_style": "linear",
        "lr_wsd_decay_iters": round(train_iters / 5),
    }


def _sizes(num_layers: int, hidden_size: int, num_attention_heads: int, seq_length: int) -> dict[str, object]:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "kv_channels": hidden_size // num_attention_heads,
        "ffn_hidden_size": 2 * hidden_size,
        "seq_length": seq_length,
        "max_position_embeddings": seq_length,
    }


_OPTIMIZER: dict[str, object] = {
    "init_method_std": 0.02,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "clip_grad": 1.0,
    # The paper decays matrices by 0.1 under Muon and nothing under AdamW. An AdamW run of ours has the matrices in
    # AdamW too, so they keep the 0.1, the usual value there as well; Megatron decays no 1-D parameter (λ, gains).
    "weight_decay": 0.1,
}

_FAMILY: dict[str, object] = {
    **_OPTIMIZER,
    "micro_batch_size": 4,
    "global_batch_size": 128,
    "log_interval": 10,
    "eval_interval": 1000,
    "eval_iters": 20,
    "save_interval": 1000,
}

_PRESETS = [
    Preset(
        "demo",
        "a few minutes on two CPU cores, to see a loss fall; no size of the paper",
        {
            **_sizes(num_layers=4, hidden_size=128, num_attention_heads=4, seq_length=256),
            **_wsd(train_iters=400, lr=3e-3, min_lr=3e-4, warmup=40),
            **_OPTIMIZER,
            "micro_batch_size": 4,
            "global_batch_size": 8,
            "log_interval": 10,
            "eval_interval": 100,
            "eval_iters": 10,
            "save_interval": 100,
        },
    ),
    Preset(
        "450M",
        "the paper's main family: 10B tokens, depth matched to the ungated model's parameters",
        {
            **_sizes(num_layers=32, hidden_size=1024, num_attention_heads=16, seq_length=2048),
            **_wsd(train_iters=38_147, lr=3e-3, min_lr=3e-4, warmup=1000),
            **_FAMILY,
        },
        depth_reference="base",
    ),
    Preset(
        "1B",
        "the paper's large family: 20B tokens; its batch is not published, the 450M family's is used",
        {
            **_sizes(num_layers=32, hidden_size=1536, num_attention_heads=16, seq_length=2048),
            **_wsd(train_iters=76_294, lr=3e-3, min_lr=3e-4, warmup=1000),
            **_FAMILY,
        },
        depth_reference="dynamic-e-exoformer",
    ),
]

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _PRESETS}


def get_preset(name: str) -> Preset:
    """Look a preset up by its name; raises ``ExoConfigError`` with the nearest names otherwise."""
    if name in PRESETS:
        return PRESETS[name]
    by_folded = {known.casefold(): known for known in PRESETS}
    near = [by_folded[match] for match in difflib.get_close_matches(name.casefold(), by_folded, n=3, cutoff=0.4)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(PRESETS)}"
    raise ExoConfigError(f"unknown preset {name!r}; {hint}")


def resolve(name: str, exo: ExoConfig) -> dict[str, object]:
    """The arguments of a preset for one variant: Megatron argument destination → value.

    Widths are the same for all variants of a family. The depth is that of the deepest model with no more parameters
    than the family's reference: at 450M the ungated model of 32 layers, which gives 29 layers with a gate and 28
    with anchor matrices as well; at 1B the dynamic E-ExoFormer of 32 layers, which gives 32 with a gate, whatever the
    anchor, and 35 without.

    Raises:
        ExoConfigError: if there is no such preset.
    """
    preset = get_preset(name)
    arguments = dict(preset.arguments)
    if preset.depth_reference is not None:
        arguments["num_layers"] = _matched_depth(exo, get_variant(preset.depth_reference).exo, preset.arguments)
    return arguments


def _matched_depth(exo: ExoConfig, reference: ExoConfig, arguments: Mapping[str, object]) -> int:
    def count(of: ExoConfig, num_layers: int) -> int:
        return sum(parameters(of, _model_sizes(arguments, num_layers)).values())

    depth = _integer(arguments, "num_layers")
    budget = count(reference, depth) * (1 + _DEPTH_TOLERANCE)
    while count(exo, depth + 1) <= budget:
        depth += 1
    while count(exo, depth) > budget:
        depth -= 1
    return depth


def _model_sizes(arguments: Mapping[str, object], num_layers: int) -> ModelSizes:
    return ModelSizes(
        num_layers=num_layers,
        hidden_size=_integer(arguments, "hidden_size"),
        num_attention_heads=_integer(arguments, "num_attention_heads"),
        num_query_groups=_integer(arguments, "num_attention_heads"),
        kv_channels=_integer(arguments, "kv_channels"),
        ffn_hidden_size=_integer(arguments, "ffn_hidden_size"),
        vocab_size=GPT2_VOCAB_SIZE,
        seq_length=_integer(arguments, "seq_length"),
    )


def _integer(arguments: Mapping[str, object], name: str) -> int:
    value = arguments[name]
    assert isinstance(value, int)
    return value
