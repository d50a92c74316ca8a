"""Checkpoints in the format of the paper author's public code, read as data.

Such a file is a dict: ``model`` (a state dict, keys prefixed by ``torch.compile``), ``model_args`` (every
architecture switch), ``step``, ``tokens_processed`` and ``config``. The author's model file went through four
layouts before the current one. Only ``model2`` names tensors differently; the others differ in which switches
they had, and where a switch is absent the tensors say what it was.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_exo.config import PATHWAYS, ExoConfig
from megatron_exo.convert.mapping import (
    Direct,
    Flattened,
    PackedProjections,
    ParameterMapping,
    SelectedRows,
    State,
    SwappedSwiGLU,
    export_state,
    import_state,
    per_layer,
)
from megatron_exo.convert.reference_switches import ReferenceFormatError, exo_from_switches, sizes_from_switches
from megatron_exo.errors import UserError, reason
from megatron_exo.plain_pickle import check_saved, check_tensor
from megatron_exo.sizes import ModelSizes


@dataclass(frozen=True)
class ReferenceCheckpoint:
    """A checkpoint of the author's code, ready for our model."""

    exo: ExoConfig
    sizes: ModelSizes
    step: int
    tokens: int
    state: dict[str, Tensor]
    """Weights by our unsharded names, in the file's dtypes, on the CPU."""
    layout: str
    """``model2`` for the layout with a V and G norm in every layer, ``current`` for all that name tensors alike."""
    dropped: tuple[str, ...]
    """One line for each tensor, or rows of one, that the author's model holds but never uses."""


def reference_table(exo: ExoConfig, sizes: ModelSizes) -> list[ParameterMapping]:
    """Every parameter of the author's current layout against ours.

    Raises:
        ReferenceFormatError: for an axis that the author's code does not have.
    """
    _refuse_what_the_reference_lacks(exo, sizes)
    h, heads, head_dim = sizes.hidden_size, sizes.num_attention_heads, sizes.kv_channels
    stored = "qkvg" if exo.has_gate else "qkv"
    lambda_shape = {"scalar": (), "headwise": (heads,), "elementwise": (heads, head_dim)}[exo.granularity]
    outputs = tuple(2 * PATHWAYS.index(c) + i for c in exo.pathways for i in (0, 1))
    ours, attention, theirs = "decoder.layers.*", "decoder.layers.*.self_attention", "transformer.layers.*"

    table: list[ParameterMapping] = [
        Direct("embedding.word_embeddings.weight", "transformer.wte.weight", (sizes.vocab_size, h)),
        Direct("decoder.final_layernorm.weight", "transformer.final_norm.weight", (h,)),
    ]
    if not sizes.tied_embeddings:
        table += [Direct("output_layer.weight", "lm_head.weight", (sizes.vocab_size, h))]
    layer: list[ParameterMapping] = [
        Direct(f"{ours}.input_layernorm.weight", f"{theirs}.attn_norm.weight", (h,)),
        PackedProjections(
            f"{attention}.linear_qkv.weight", f"{theirs}.attn.c_attn.weight", sizes, stored=stored, kept=exo.components
        ),
        Direct(f"{attention}.q_layernorm.weight", f"{theirs}.attn.q_norm.weight", (head_dim,)),
        Direct(f"{attention}.k_layernorm.weight", f"{theirs}.attn.k_norm.weight", (head_dim,)),
        Direct(f"{attention}.linear_proj.weight", f"{theirs}.attn.c_proj.weight", (h, heads * head_dim)),
        Direct(f"{ours}.pre_mlp_layernorm.weight", f"{theirs}.mlp_norm.weight", (h,)),
        SwappedSwiGLU(f"{ours}.mlp.linear_fc1.weight", f"{theirs}.mlp.fc1.weight", (2 * sizes.ffn_hidden_size, h)),
        Direct(f"{ours}.mlp.linear_fc2.weight", f"{theirs}.mlp.fc2.weight", (h, sizes.ffn_hidden_size)),
    ]
    mixed: list[ParameterMapping] = [
        Flattened(f"{attention}.mixing.lambda_{c}{i}", f"{theirs}.attn.lambda_{c}{i}", lambda_shape)
        for c in exo.pathways
        for i in (1, 2)
    ]
    if exo.is_dynamic:
        our_mlp, their_mlp = f"{attention}.dynamic_mixing", f"{theirs}.attn.dynamic_mixing"
        width = exo.dynamic_hidden_size
        mixed += [
            Direct(f"{our_mlp}.fc1.weight", f"{their_mlp}.fc1.weight", (width, h)),
            SelectedRows(f"{our_mlp}.fc2.weight", f"{their_mlp}.fc2.weight", (2 * len(stored), width), outputs),
            SelectedRows(f"{our_mlp}.fc2.bias", f"{their_mlp}.fc2.bias", (2 * len(stored),), outputs),
        ]
    table += per_layer(range(sizes.num_layers), layer)
    table += per_layer([n for n in range(sizes.num_layers) if exo.mixes(n + 1)], mixed)
    if exo.is_exogenous:
        kept = "".join(c for c in exo.components if c in exo.pathways)
        table += [
            PackedProjections(
                "decoder.layers.0.anchor.linear_qkv.weight", "anchor_proj.weight", sizes, stored=stored, kept=kept
            ),
            *(
                Direct(f"decoder.layers.0.anchor.{c}_norm", f"anchor_{c}_norm.weight", (head_dim,))
                for c in exo.anchor_norm
            ),
        ]
    elif exo.anchor == "internal":
        # Q and K anchors reuse layer 1's QK-norm and have no norm of their own.
        table += [
            Direct(f"decoder.layers.0.anchor.{c}_norm", f"transformer.layers.0.attn.{c}_res_norm.weight", (head_dim,))
            for c in exo.anchor_norm
            if c in "vg"
        ]
    return table


def state_to_reference(exo: ExoConfig, sizes: ModelSizes, state: State) -> dict[str, Tensor]:
    """Our unsharded state dict under the author's names (current layout, no prefix), for gradients just as well.

    Rows that only the author's model holds come back as zeros, which is their gradient.
    Raises ``ReferenceFormatError`` for axes the author's code lacks, ``ConversionError`` for a state that does not fit.
    """
    return export_state(reference_table(exo, sizes), state)


def read_reference_checkpoint(path: str | Path) -> ReferenceCheckpoint:
    """Read one of the author's checkpoints; nothing in the file is executed.

    Raises:
        ReferenceFormatError: for a file that is no such checkpoint, holds code, lacks or adds tensors, or uses
            a switch that our model does not express; one line that names the file and the culprit.
        FileNotFoundError: if there is no file.
    """
    try:
        raw = _load(Path(path))
        theirs = {name.removeprefix("_orig_mod."): tensor for name, tensor in raw["model"].items()}
        args = dict(raw["model_args"])
        is_model2 = any(name.endswith((".attn.v_norm.weight", ".attn.g_norm.weight")) for name in theirs)
        if is_model2:
            theirs = {_current_name(name): tensor for name, tensor in theirs.items()}
            args |= _switches_of_model2()
        exo, sizes = exo_from_switches(args, theirs), sizes_from_switches(args)
        if sizes.num_layers > len(theirs):  # before a table of so many rows is made
            raise ReferenceFormatError(
                f"model_args has n_layer={sizes.num_layers}, the model only {len(theirs)} tensors"
            )
        table = reference_table(exo, sizes)
        unused = sorted(_unused_names(exo, sizes) & theirs.keys())
        state = import_state(table, {name: tensor for name, tensor in theirs.items() if name not in unused})
    except ValueError as error:
        raise ReferenceFormatError(f"{path}: {error}") from None
    rows = [f"{', '.join(row.their_names)}: {row.dropped()}" for row in table if row.dropped()]
    return ReferenceCheckpoint(
        exo=exo,
        sizes=sizes,
        step=raw.get("step", 0),
        tokens=raw.get("tokens_processed", 0),
        state=state,
        layout="model2" if is_model2 else "current",
        dropped=(*unused, *rows),
    )


def read_tokens(path: Path) -> Tensor:
    """The int64 tensor ``[b, s]`` in a file of ``torch.save``, to hold a model of ours against the author's on.

    Raises:
        UserError: the file holds anything else; nothing in it has been executed.
    """
    try:
        with path.open("rb") as file:
            check_saved(file)
            tokens = torch.load(file, map_location="cpu", weights_only=True)
        if isinstance(tokens, Tensor):
            check_tensor(tokens)
    except Exception as error:  # damaged bytes raise whatever they like
        raise UserError(f"{path} is not a tensor saved with torch.save: {reason(error)}") from error
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2 or not tokens.numel():
        raise UserError(f"{path} must hold an int64 tensor [b, s]")
    return tokens


def _load(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        try:
            is_archive = zipfile.is_zipfile(file)
        except zipfile.BadZipFile:  # of a kind that Python does not read
            is_archive = False
        if not is_archive:
            raise ReferenceFormatError("not a PyTorch checkpoint; it may be truncated, or not what its name says")
        try:
            check_saved(file)
            raw = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ReferenceFormatError(
                "the file holds Python objects besides tensors and plain values, which are not loaded because they can "
                f"run code ({reason(error)}); save a dict of plain 'model' and 'model_args' again"
            ) from None
        except Exception as error:  # damaged bytes raise whatever they like
            raise ReferenceFormatError(f"not a readable PyTorch checkpoint ({reason(error)})") from error
    if not isinstance(raw, dict) or not all(isinstance(raw.get(key), Mapping) for key in ("model", "model_args")):
        raise ReferenceFormatError(
            "not a checkpoint of the author's code, which is a dict with 'model' and 'model_args'"
        )
    for name, value in raw["model"].items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ReferenceFormatError(f"model entry {name!r} is a {type(value).__name__}, not a tensor with a name")
        try:
            check_tensor(value)
        except pickle.UnpicklingError as error:
            raise ReferenceFormatError(f"model entry {name!r} is damaged: {error}") from None
    for switch, value in raw["model_args"].items():
        if not isinstance(value, (bool, int, float, str, type(None))):
            raise ReferenceFormatError(f"model_args entry {switch} is a {type(value).__name__}, not a plain value")
    for name in ("step", "tokens_processed"):
        if not isinstance(raw.get(name, 0), int):
            raise ReferenceFormatError(f"{name} is {raw[name]!r}, not a whole number")
    return raw


def _switches_of_model2() -> dict[str, bool]:
    """What the ``model2`` file did whatever its switches said: it had none for the anchor's norms and source."""
    return {f"{c}_residual_norm_enabled": True for c in PATHWAYS} | {
        "decouple_anchor": False,
        "dynamic_mixing_enabled": False,
    }


def _current_name(name: str) -> str:
    """``model2`` called layer 1's V and G anchor norms ``v_norm`` and ``g_norm``; those of later layers are unused."""
    for c in "vg":
        if name == f"transformer.layers.0.attn.{c}_norm.weight":
            return f"transformer.layers.0.attn.{c}_res_norm.weight"
    return name


def _unused_names(exo: ExoConfig, sizes: ModelSizes) -> set[str]:
    """Names of tensors that the author's code creates without using them at this point on the axes."""
    layers = [f"transformer.layers.{n}.attn" for n in range(sizes.num_layers)]
    names = {f"{layer}.{c}_norm.weight" for layer in layers[1:] for c in "vg"}  # model2
    if exo.anchor != "internal":
        names |= {f"anchor_{c}_norm.weight" for c in PATHWAYS if c not in exo.pathways}
    if not exo.is_exogenous:
        names |= {f"{layers[0]}.{c}_res_norm.weight" for c in "vg" if c not in exo.pathways}
    if exo.anchor == "none":
        mlp = ("fc1.weight", "fc2.weight", "fc2.bias")
        names |= {"anchor_proj.weight", *(f"{layer}.dynamic_mixing.{part}" for layer in layers for part in mlp)}
    return names


def _refuse_what_the_reference_lacks(exo: ExoConfig, sizes: ModelSizes) -> None:
    heads, groups, head_dim = sizes.num_attention_heads, sizes.num_query_groups, sizes.kv_channels
    lacking = {
        f"anchor {exo.anchor}": exo.anchor in ("h1", "h2"),
        f"post norm of {exo.post_norm.upper()}": bool(exo.post_norm),
        f"control {exo.control}": exo.control != "none",
        f"{groups} query groups for {heads} heads": groups != heads,
        f"heads of {head_dim} channels at hidden size {sizes.hidden_size}": heads * head_dim != sizes.hidden_size,
    }
    for what, present in lacking.items():
        if present:
            raise ReferenceFormatError(f"the author's code has no {what}; its format cannot hold this model")
