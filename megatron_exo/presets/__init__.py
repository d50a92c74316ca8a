"""Sizes and recipes as data: what ``--preset`` fills in, unless the command line says otherwise.

Each size is a file beside this one, and what they have in common is in ``recipe.toml``; keys are Megatron's argument
destinations, ``tokens`` beside them. To add a preset, add a file. Numbers of the two families are those of arXiv
2601.08131; the description of a file says what is ours. The vocabulary is not part of a preset: it belongs to the
tokenizer.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_exo.config import ExoConfig, ExoConfigError
from megatron_exo.presets.matching import Matching
from megatron_exo.sizes import ModelSizes
from megatron_exo.variants import get_variant

GPT2_VOCAB_SIZE = 50_257
"""The vocabulary with which models are compared in size: that of the paper's data."""

_FOLDER = Path(__file__).parent
_RECIPE = _FOLDER / "recipe.toml"


@dataclass(frozen=True)
class Preset:
    """A size with its recipe."""

    name: str
    description: str
    arguments: Mapping[str, Any]
    """Megatron argument destination → value."""
    reference: str
    """The variant that ``num_layers`` holds for."""
    match: str
    """How the other variants are made comparable to it: one of :data:`megatron_exo.presets.matching.RULES`."""
    tokens: int
    """Length of the run."""


def steps_for(tokens: int, global_batch_size: int, seq_length: int) -> int:
    """The whole steps that a number of tokens takes: the last one reaches it, or goes beyond it."""
    return -(-tokens // (global_batch_size * seq_length))


def _wsd(train_iters: int, lr: float, warmup: int) -> dict[str, Any]:
    """Warm-up, a flat stretch, and the last part of the run down to a part of the rate.

    Step k of the warm-up's n has the rate (k + 1) / n, as the author's. Megatron's warm-up begins at zero, and wastes a
    step; it gives the same rates where it begins at 1 / n and takes a step less.
    """
    return {
        "train_iters": train_iters,
        "lr": lr,
        "min_lr": round(_SHAPE["final_lr"] * lr, 12),  # 3e-4 and not 3.0000000000000003e-4
        "lr_warmup_init": lr / warmup if warmup else 0.0,
        "lr_warmup_iters": max(0, warmup - 1),
        "lr_decay_iters": train_iters,
        "lr_wsd_decay_iters": max(1, round(_SHAPE["decay"] * train_iters)),
    }


def _load(path: Path) -> Preset:
    content = tomllib.loads(path.read_text())
    model, training = content["model"], content["training"]
    tokens, warmup = int(training.pop("tokens")), training.pop("lr_warmup_iters")
    iters = steps_for(tokens, training["global_batch_size"], model["seq_length"])
    arguments = {
        **_COMMON,
        **model,
        "kv_channels": model["hidden_size"] // model["num_attention_heads"],
        "max_position_embeddings": model["seq_length"],
        **training,
        **_wsd(iters, training["lr"], warmup),
    }
    match = content.get("match", "params")
    return Preset(path.stem, content["description"], arguments, content["reference"], match, tokens)


_COMMON = tomllib.loads(_RECIPE.read_text())
_SHAPE: Mapping[str, float] = _COMMON.pop("shape")
_PRESETS = [_load(path) for path in _FOLDER.glob("*.toml") if path != _RECIPE]
PRESETS: dict[str, Preset] = {
    preset.name: preset for preset in sorted(_PRESETS, key=lambda preset: preset.arguments["hidden_size"])
}


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
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "seq_length",
    "global_batch_size",
    "step_batch_size_schedule",
)
"""Arguments of Megatron that other values of a preset follow; see :func:`resolve`."""


def resolve(
    name: str,
    exo: ExoConfig,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    *,
    match: str | None = None,
    match_to: str | None = None,
) -> dict[str, Any]:
    """The arguments of a preset for one variant: Megatron argument destination → value.

    Sizes are those of the model that matches the reference (see :func:`matching_of`). With the preset's own rule and
    reference at 450M, the ungated model of 32 layers, that is 29 layers with a gate and 28 with anchor matrices as
    well; at 1B, the dynamic E-ExoFormer of 32 layers, it is 32 with a gate, whatever the anchor, and 35 without.

    Args:
        name: the preset.
        exo: the variant.
        overrides: what the command line gives of :data:`ADJUSTABLE`, and ``train_tokens``. It wins, and what hangs on
            it follows: a run of another length keeps the schedule's shape, another batch or context the length in
            tokens, another width the head and FFN proportions, another rate its final tenth. The command line may
            still override what follows.
        match: how to match, instead of the preset's rule.
        match_to: the variant to match, instead of the preset's reference.

    Raises:
        ExoConfigError: if there is no such preset or variant, a width cannot be divided into its heads, or a size is
            given that the rule is asked to find.
    """
    preset = get_preset(name)
    matching = matching_of(name, overrides, match=match, match_to=match_to)
    sizes = matching.solve(exo)
    return {
        **preset.arguments,
        **_widths(preset.arguments, overrides),
        **_schedule(preset, overrides),
        "num_layers": sizes.num_layers,
        "ffn_hidden_size": sizes.ffn_hidden_size,
    }


def matching_of(
    name: str,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    *,
    match: str | None = None,
    match_to: str | None = None,
) -> Matching:
    """What the models of a preset are matched to, and how; arguments and errors as for :func:`resolve`.

    The reference has the preset's sizes and those that are given. If it is not the preset's own, it has the depth that
    matches the preset's own in parameters, as in the paper. A given depth is the reference's only where the rule does
    not solve the depth; without a rule, it is not matched to anything.
    """
    preset = get_preset(name)
    rule = match or preset.match
    solved = {"params": "num_layers", "flops": "num_layers", "depth": "ffn_hidden_size", "none": ""}[rule]
    if solved in overrides:
        if match is not None or match_to is not None:
            raise ExoConfigError(
                f"--match {rule} finds --{solved.replace('_', '-')}, which is given, too; leave one of them out"
                + (", or use --match depth, which finds the FFN width" if solved == "num_layers" else "")
            )
        rule = "none"
    widths = _widths(preset.arguments, overrides)
    sizes = ModelSizes(
        num_layers=overrides.get("num_layers", preset.arguments["num_layers"]),
        hidden_size=widths["hidden_size"],
        num_attention_heads=widths["num_attention_heads"],
        num_query_groups=overrides.get("num_query_groups", widths["num_attention_heads"]),
        kv_channels=widths["kv_channels"],
        ffn_hidden_size=widths["ffn_hidden_size"],
        vocab_size=GPT2_VOCAB_SIZE,
        seq_length=widths["seq_length"],
    )
    own = Matching(rule, preset.reference, get_variant(preset.reference).exo, sizes)
    if match_to is None:
        return own
    if rule == "none":
        raise ExoConfigError("--match-to without a rule; pass --match params, flops or depth beside it")
    exo = get_variant(match_to).exo
    has_depth = preset.match == "none" or "num_layers" in overrides
    by_params = Matching("none" if has_depth else preset.match, own.variant, own.exo, sizes)
    return Matching(rule, match_to, exo, by_params.solve(exo))


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


def _schedule(preset: Preset, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The learning rate and the rhythm of a run, in iterations.

    In samples where its length is given in samples or its batch grows, with warm-up and intervals in batches of the
    preset.

    A shorter run warms up for the same share of its iterations, a longer one for as many as the preset. It evaluates
    four times, saves at its end and logs ten times, or more often where the preset does.
    """
    own = preset.arguments
    batch, seq_length = (overrides.get(name, own[name]) for name in ("global_batch_size", "seq_length"))
    grows = "step_batch_size_schedule" in overrides
    in_samples = grows or "train_samples" in overrides
    samples = overrides.get("train_samples") or steps_for(overrides.get("train_tokens", preset.tokens), 1, seq_length)
    if in_samples:
        iters = max(1, samples // batch)
    elif "train_iters" in overrides:
        iters = overrides["train_iters"]
    else:
        iters = steps_for(overrides.get("train_tokens", preset.tokens), batch, seq_length)
    planned = own["lr_warmup_iters"] + 1
    warmup = min(planned, round(planned * iters / own["train_iters"]))
    if "lr_warmup_fraction" in overrides:
        warmup = 0  # Megatron wants one of the two
    schedule = _wsd(iters, overrides.get("lr", own["lr"]), warmup)
    if in_samples:
        decay = schedule["lr_wsd_decay_iters"]
        schedule |= {"train_iters": None, "lr_warmup_iters": 0, "lr_decay_iters": None, "lr_wsd_decay_iters": None}
        schedule |= {"train_samples": samples, "lr_decay_samples": samples}
        schedule |= {"lr_warmup_samples": max(0, warmup - 1) * batch, "lr_wsd_decay_samples": decay * batch}
    if grows:
        schedule["global_batch_size"] = None  # Megatron wants one of the two
    shortest = {"eval_interval": iters // 4, "save_interval": iters, "log_interval": iters // 10}
    return schedule | {interval: max(1, min(own[interval], most)) for interval, most in shortest.items()}
