"""The author's architecture switches (``model_args`` of a checkpoint) as a point on our axes and as sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_exo.config import PATHWAYS, ExoConfig
from megatron_exo.convert.mapping import ConversionError, State
from megatron_exo.sizes import ModelSizes

_PATHWAY_WORDS = {"q": "query", "k": "key", "v": "value", "g": "gate"}

_SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
_OTHER_SIZES = ("mlp_hidden_dim", "mlp_ratio", "rope_theta", "rmsnorm_eps", "weight_tying")
_AXES = ("gated_attention_enabled", "decouple_anchor", "residual_mode", "dynamic_mixing_enabled",
         "dynamic_mixing_hidden_dim", *(f"{word}_res_enabled" for word in _PATHWAY_WORDS.values()),
         *(f"{c}_residual_norm_enabled" for c in PATHWAYS))  # fmt: skip
_WITHOUT_EFFECT_ON_WEIGHTS = {
    "embedding_dropout", "residual_dropout", "attention_dropout", "flash_attention", "init_std", "init_cutoff_factor",
    "yarn_max_seq_len", "yarn_alpha", "yarn_beta", "smear_gate_dim", "embedding_layer0_alpha_init", "anchor_delta_init",
    *(f"{word}_res_lambda_init" for word in _PATHWAY_WORDS.values()),
}  # fmt: skip
"""Switches that act only in training, only at initialisation, or only with a switch that is refused."""

_LARGEST = 1 << 31
"""No size of a model, base of its angles or other switch is near it."""

_ONLY_VALUE: dict[str, tuple[Any, Any]] = {
    # switch: (the one value that our model expresses, the author's default)
    "norm_pos": ("before", "after"),
    "act_type": ("swiglu", "gelu"),
    "qk_norm": (True, True),
    "rmsnorm_use_weight": (True, True),
    "rmsnorm_use_bias": (False, False),
    "clip_qkv": (None, None),
    "logit_soft_cap": (None, None),
    "yarn_enabled": (False, False),
    # On by default in the author's code, but with tensors of their own: without the tensors they were off.
    "smear_gate_enabled": (False, False),
    "per_layer_backout": (False, False),
    "embedding_layer0_mix_enabled": (False, False),
    "anchor_delta_enabled": (False, False),
}


class ReferenceFormatError(ConversionError):
    """A file that is not a checkpoint of the author's code, or that our model cannot express: what and why."""


def exo_from_switches(args: Mapping[str, Any], theirs: State) -> ExoConfig:
    """The axes that the author's switches stand for; what an absent (younger) switch was, the tensors tell.

    Raises:
        ReferenceFormatError: for a switch that is unknown, absent, or set to what our model does not express.
        ExoConfigError: for a residual mode that is no granularity.
    """
    known = {*_SIZES, *_OTHER_SIZES, *_AXES, *_WITHOUT_EFFECT_ON_WEIGHTS, *_ONLY_VALUE}
    unknown = sorted(args.keys() - known, key=str)
    if unknown:
        raise ReferenceFormatError(
            f"model_args has unknown switches {', '.join(map(str, unknown))}; this importer cannot judge them"
        )
    for switch, (expressible, default) in _ONLY_VALUE.items():
        value = args.get(switch, default)
        if value != expressible:
            raise ReferenceFormatError(
                f"model_args has {switch}={value!r}, which our model does not express (only {expressible!r})"
            )
    gated = bool(_required(args, "gated_attention_enabled"))
    pathways = "".join(
        c for c, word in _PATHWAY_WORDS.items() if _required(args, f"{word}_res_enabled") and (c != "g" or gated)
    )
    gate = "elementwise" if gated else "none"
    if not pathways:
        return ExoConfig(gate=gate)
    has_mlp = any(".dynamic_mixing." in name for name in theirs)
    exogenous = args.get("decouple_anchor", "anchor_proj.weight" in theirs)
    norm_name = "anchor_{}_norm.weight" if exogenous else "transformer.layers.0.attn.{}_res_norm.weight"
    return ExoConfig(
        gate=gate,
        anchor="h0" if exogenous else "internal",
        pathways=pathways,
        anchor_norm="".join(
            c for c in pathways if args.get(f"{c}_residual_norm_enabled", norm_name.format(c) in theirs)
        ),
        granularity=_required(args, "residual_mode"),
        mixing="dynamic" if args.get("dynamic_mixing_enabled", has_mlp) else "static",
        dynamic_hidden_size=_positive(args, "dynamic_mixing_hidden_dim", int, ExoConfig.dynamic_hidden_size),
    )


def sizes_from_switches(args: Mapping[str, Any]) -> ModelSizes:
    """The model's sizes; raises ``ReferenceFormatError`` for a switch that is absent or no positive number."""
    block_size, vocab_size, layers, heads, hidden_size = (_positive(args, switch, int) for switch in _SIZES)
    fc1_rows = int(hidden_size * _positive(args, "mlp_ratio", float, 4.0))
    if args.get("mlp_hidden_dim") is not None:
        fc1_rows = _positive(args, "mlp_hidden_dim", int)
    return ModelSizes(
        num_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden_size // heads,
        ffn_hidden_size=fc1_rows // 2,
        vocab_size=vocab_size,
        seq_length=block_size,
        rotary_base=_positive(args, "rope_theta", float, 500000.0),
        layernorm_epsilon=_positive(args, "rmsnorm_eps", float, 1e-6),
        tied_embeddings=bool(args.get("weight_tying", False)),
    )


def _required(args: Mapping[str, Any], switch: str) -> Any:
    if switch not in args:
        raise ReferenceFormatError(f"model_args lacks {switch}, without which the model is not determined")
    return args[switch]


def _positive[Number: (int, float)](
    args: Mapping[str, Any], switch: str, kind: type[Number], default: Number | None = None
) -> Number:
    """A positive int, or float (for which an int will do); required where there is no default."""
    value = _required(args, switch) if default is None else args.get(switch, default)
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 < value < _LARGEST:
        raise ReferenceFormatError(f"model_args has {switch}={value!r}, which is no positive {kind.__name__}")
    return kind(value)
