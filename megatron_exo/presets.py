"""Sizes and recipes as data: what ``--preset`` fills in, unless the command line says otherwise.

To add a preset: add one entry to ``_PRESETS``; keys are Megatron's argument destinations. Numbers of the two families
are those of arXiv 2601.08131; where the paper gives none, the description says what was chosen. The vocabulary is
not part of a preset: it belongs to the tokenizer.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

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
    arguments: Mapping[str, Any]
    """Megatron argument destination → value."""
    depth_reference: str | None = None
    """The variant that ``num_layers`` holds for; others get the depth that matches its parameters. ``None``: every
    variant has ``num_layers`` layers."""


def _wsd(train_iters: int, lr: float, min_lr: float, warmup: int) -> dict[str, Any]:
    """Warm-up, a flat stretch, and the last 20% linearly down to ``min_lr``."""
    return {
        "train_iters": train_iters,
        "lr": lr,
        "min_lr": min_lr,
        "lr_decay_style": "WSD",
        "lr_warmup_iters": warmup,
        "lr_decay_iters": train_iters,
        "lr_wsd_decay_style": "linear",
        "lr_wsd_decay_iters": max(1, round(train_iters / 5)),
    }


def _sizes(num_layers: int, hidden_size: int, num_attention_heads: int, seq_length: int) -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "kv_channels": hidden_size // num_attention_heads,
        "ffn_hidden_size": 2 * hidden_size,
        "seq_length": seq_length,
        "max_position_embeddings": seq_length,
    }


_OPTIMIZER: dict[str, Any] = {
    "init_method_std": 0.02,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "clip_grad": 1.0,
    # The paper decays matrices by 0.1 under Muon and nothing under AdamW. An AdamW run of ours has the matrices in
    # AdamW too, so they keep the 0.1, the usual value there as well; Megatron decays no 1-D parameter (λ, gains).
    "weight_decay": 0.1,
}

_FAMILY: dict[str, Any] = {
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


ADJUSTABLE = (
    "train_iters",
    "train_samples",
    "lr",
    "lr_warmup_fraction",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "seq_length",
    "global_batch_size",
)
"""Arguments of Megatron that other values of a preset follow; see :func:`resolve`."""


def resolve(name: str, exo: ExoConfig, overrides: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The arguments of a preset for one variant: Megatron argument destination → value.

    Widths are the same for all variants of a family. The depth is that of the deepest model with no more parameters
    than the family's reference: at 450M the ungated model of 32 layers, which gives 29 layers with a gate and 28
    with anchor matrices as well; at 1B the dynamic E-ExoFormer of 32 layers, which gives 32 with a gate, whatever the
    anchor, and 35 without.

    Args:
        name: the preset.
        exo: the variant.
        overrides: what the command line gives of :data:`ADJUSTABLE`. It wins, and what hangs on it follows: a run of
            another length keeps the schedule's shape, another width the head and FFN proportions, another rate its
            final tenth. The command line may still override what follows.

    Raises:
        ExoConfigError: if there is no such preset, or a width cannot be divided into its heads.
    """
    preset = get_preset(name)
    arguments = dict(preset.arguments) | _widths(preset.arguments, overrides) | _schedule(preset.arguments, overrides)
    if preset.depth_reference is not None:
        groups = overrides.get("num_query_groups", arguments["num_attention_heads"])
        arguments["num_layers"] = _matched_depth(exo, get_variant(preset.depth_reference).exo, arguments, groups)
    return arguments


def _widths(preset: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a layer, with one head size and one FFN width for a new hidden size or number of heads."""
    chosen = {**preset, **overrides}
    hidden_size, heads = chosen["hidden_size"], chosen["num_attention_heads"]
    if {"hidden_size", "num_attention_heads"} & overrides.keys() and "kv_channels" not in overrides:
        if hidden_size % heads:
            raise ExoConfigError(
                f"hidden size {hidden_size} cannot be divided into {heads} heads; "
                "give another --hidden-size or --num-attention-heads, or the channels of a head with --kv-channels"
            )
        chosen["kv_channels"] = hidden_size // heads
    if "hidden_size" in overrides and "ffn_hidden_size" not in overrides:
        chosen["ffn_hidden_size"] = 2 * hidden_size
    chosen["max_position_embeddings"] = chosen["seq_length"]
    followed = ("hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "seq_length")
    return {size: chosen[size] for size in (*followed, "max_position_embeddings")}


def _schedule(preset: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The learning rate and the rhythm of a run, in iterations, or in samples where its length is given in samples.

    A shorter run warms up for the same share of its iterations, a longer one for as many as the preset. It evaluates
    four times, saves at its end and logs ten times, or more often where the preset does.
    """
    batch = overrides.get("global_batch_size", preset["global_batch_size"])
    in_samples = "train_samples" in overrides
    if in_samples:
        iters = max(1, overrides["train_samples"] // batch)
    else:
        iters = overrides.get("train_iters", preset["train_iters"])
    warmup = min(preset["lr_warmup_iters"], round(preset["lr_warmup_iters"] * iters / preset["train_iters"]))
    if "lr_warmup_fraction" in overrides:
        warmup = 0  # Megatron wants one of the two
    schedule = _wsd(iters, overrides.get("lr", preset["lr"]), preset["min_lr"], warmup)
    if "lr" in overrides:
        schedule["min_lr"] = overrides["lr"] * preset["min_lr"] / preset["lr"]
    if in_samples:
        decay = schedule["lr_wsd_decay_iters"]
        schedule |= {"train_iters": None, "lr_warmup_iters": 0, "lr_decay_iters": None, "lr_wsd_decay_iters": None}
        schedule |= {"train_samples": overrides["train_samples"], "lr_decay_samples": overrides["train_samples"]}
        schedule |= {"lr_warmup_samples": warmup * batch, "lr_wsd_decay_samples": decay * batch}
    shortest = {"eval_interval": iters // 4, "save_interval": iters, "log_interval": iters // 10}
    return schedule | {interval: max(1, min(preset[interval], most)) for interval, most in shortest.items()}


def _matched_depth(exo: ExoConfig, reference: ExoConfig, arguments: Mapping[str, Any], num_query_groups: int) -> int:
    def count(of: ExoConfig, num_layers: int) -> int:
        sizes = ModelSizes(
            num_layers=num_layers,
            hidden_size=arguments["hidden_size"],
            num_attention_heads=arguments["num_attention_heads"],
            num_query_groups=num_query_groups,
            kv_channels=arguments["kv_channels"],
            ffn_hidden_size=arguments["ffn_hidden_size"],
            vocab_size=GPT2_VOCAB_SIZE,
            seq_length=arguments["seq_length"],
        )
        return sum(parameters(of, sizes).values())

    depth = arguments["num_layers"]
    budget = count(reference, depth) * (1 + _DEPTH_TOLERANCE)
    while count(exo, depth + 1) <= budget:
        depth += 1
    while count(exo, depth) > budget:
        depth -= 1
    return depth
