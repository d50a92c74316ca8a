"""The author's checkpoints are read as data, exactly, and anything unexpected in them is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_exo.config import ExoConfig
from megatron_exo.convert.mapping import (
    ConversionError,
    PackedProjections,
    SelectedRows,
    SwappedSwiGLU,
    import_state,
)
from megatron_exo.convert.reference import (
    ReferenceFormatError,
    read_reference_checkpoint,
    reference_table,
    state_to_reference,
)
from megatron_exo.sizes import ModelSizes
from megatron_exo.variants import VARIANTS
from tests import golden_values
from tests.plain_reference import parameter_shapes

Raw = dict[str, Any]
PREFIX = "_orig_mod."


def raw_checkpoint(name: str = "exoformer_elementwise", folder: str = "variants") -> Raw:
    return torch.load(golden_values.GOLDEN / folder / f"{name}.ckpt.pt", weights_only=True)


def save(raw: object, tmp_path: Path) -> Path:
    path = tmp_path / "ckpt.pt"
    torch.save(raw, path)
    return path


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("baseline", "base"),
        ("gated", "gated"),
        ("resformer_value_only", "resformer"),
        ("nuresformer_headwise", "h-nuresformer"),
        ("nuresformer_scalar_qk_norm_only", "s-nuresformer-qk-norm"),
        ("exoformer_elementwise", "e-exoformer"),
        ("exoformer_elementwise_no_norm", "e-exoformer-no-norm"),
        ("exoformer_elementwise_vg_only", "e-exoformer-vg"),
        ("dynamic_exoformer_scalar", "dynamic-s-exoformer"),
        ("dynamic_nuresformer_elementwise", "dynamic-e-nuresformer"),
    ],
)
def test_the_authors_switches_become_the_papers_variant(name: str, variant: str) -> None:
    assert golden_values.checkpoint("variants", name).exo == VARIANTS[variant].exo


def test_sizes_step_and_tokens_are_read() -> None:
    source = golden_values.checkpoint("variants", "gated")
    assert (source.step, source.tokens, source.layout) == (7, 12345, "current")
    assert source.sizes == ModelSizes(
        num_layers=3, hidden_size=32, num_attention_heads=4, num_query_groups=4, kv_channels=8, ffn_hidden_size=64,
        vocab_size=64, seq_length=64, rotary_base=500000.0, layernorm_epsilon=1e-6, tied_embeddings=False,
    )  # fmt: skip


@pytest.mark.parametrize("path", golden_values.CHECKPOINTS, ids=lambda path: path.name.removesuffix(".ckpt.pt"))
def test_a_checkpoint_survives_the_way_there_and_back(path: Path) -> None:
    source = read_reference_checkpoint(path)
    assert {n: tuple(t.shape) for n, t in source.state.items()} == parameter_shapes(
        source.exo, golden_values.plain_sizes(source.sizes)
    )

    theirs = {n.removeprefix(PREFIX): t for n, t in torch.load(path, weights_only=True)["model"].items()}
    back = state_to_reference(source.exo, source.sizes, source.state)
    again = import_state(reference_table(source.exo, source.sizes), back)

    assert all(torch.equal(again[name], source.state[name]) for name in source.state)
    dropped = {line.split(":")[0] for line in source.dropped}
    if source.layout == "current":
        assert back.keys() == theirs.keys() - {name for name in dropped if name not in back}
    for name in back.keys() & theirs.keys() - dropped:
        assert torch.equal(back[name], theirs[name]), name


def test_unused_rows_and_norms_are_dropped_and_mentioned() -> None:
    vg_only = golden_values.checkpoint("variants", "exoformer_elementwise_vg_only")
    assert vg_only.dropped == ("anchor_proj.weight: rows of Q, K",)
    model2 = golden_values.checkpoint("released_formats", "model2_nuresformer_scalar")
    assert model2.layout == "model2"
    assert model2.dropped == tuple(f"transformer.layers.{n}.attn.{c}_norm.weight" for n in (1, 2) for c in "gv")


def test_the_first_layers_norms_of_model2_are_the_anchors() -> None:
    raw = raw_checkpoint("model2_nuresformer_elementwise", "released_formats")
    source = golden_values.checkpoint("released_formats", "model2_nuresformer_elementwise")
    for c in "vg":
        theirs = raw["model"][f"{PREFIX}transformer.layers.0.attn.{c}_norm.weight"]
        assert torch.equal(source.state[f"decoder.layers.0.anchor.{c}_norm"], theirs)


def test_model2_normalised_its_anchors_whatever_its_switches_say(tmp_path: Path) -> None:
    raw = raw_checkpoint("model2_nuresformer_elementwise", "released_formats")
    for c in "qkvg":
        del raw["model_args"][f"{c}_residual_norm_enabled"]
    raw["model_args"]["decouple_anchor"] = True
    source = read_reference_checkpoint(save(raw, tmp_path))
    assert source.exo == VARIANTS["e-nuresformer"].exo


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("released_formats", "model1_nuresformer_elementwise_no_norm"),
        ("released_formats", "model3_exoformer_elementwise"),
        ("released_formats", "model4_dynamic_exoformer_elementwise"),
    ],
)
def test_switches_that_a_layout_did_not_have_yet_are_read_off_the_tensors(
    folder: str, name: str, tmp_path: Path
) -> None:
    raw, complete = raw_checkpoint(name, folder), golden_values.checkpoint(folder, name)
    younger = ("decouple_anchor", "residual_norm_enabled", "dynamic_mixing", "anchor_delta", "embedding_layer0")
    raw["model_args"] = {k: v for k, v in raw["model_args"].items() if not any(word in k for word in younger)}
    assert read_reference_checkpoint(save(raw, tmp_path)).exo == complete.exo


def test_only_the_outputs_of_mixed_pathways_are_kept(tmp_path: Path) -> None:
    """The author's mixing MLP has 8 outputs whatever is mixed; without the K switch, K's two are never used."""
    raw = raw_checkpoint("dynamic_exoformer_elementwise")
    raw["model_args"]["key_res_enabled"] = False
    raw["model"] = {name: value for name, value in raw["model"].items() if ".lambda_k" not in name}
    source = read_reference_checkpoint(save(raw, tmp_path))
    theirs = raw["model"][f"{PREFIX}transformer.layers.1.attn.dynamic_mixing.fc2.bias"]
    ours = source.state["decoder.layers.1.self_attention.dynamic_mixing.fc2.bias"]
    assert torch.equal(ours, theirs[[0, 1, 4, 5, 6, 7]])
    assert "anchor_k_norm.weight" in source.dropped
    assert "anchor_proj.weight: rows of K" in source.dropped
    assert "transformer.layers.1.attn.dynamic_mixing.fc2.bias: rows 2, 3" in source.dropped
    back = state_to_reference(source.exo, source.sizes, source.state)
    assert not back["transformer.layers.1.attn.dynamic_mixing.fc2.bias"][2:4].any()


def test_a_tied_checkpoint_has_no_output_layer(tmp_path: Path) -> None:
    raw = raw_checkpoint("gated")
    raw["model_args"]["weight_tying"] = True
    del raw["model"][f"{PREFIX}lm_head.weight"]
    source = read_reference_checkpoint(save(raw, tmp_path))
    assert source.sizes.tied_embeddings
    assert "output_layer.weight" not in source.state


def _set(switch: str, value: object) -> Callable[[Raw], None]:
    return lambda raw: raw["model_args"].update({switch: value})


def _add(name: str, tensor: Tensor) -> Callable[[Raw], None]:
    return lambda raw: raw["model"].update({PREFIX + name: tensor})


def _remove(name: str) -> Callable[[Raw], None]:
    return lambda raw: raw["model"].pop(PREFIX + name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_add("backout_lambdas", torch.zeros(3)), "unexpected backout_lambdas"),
        (
            _add("transformer.layers.3.attn_norm.weight", torch.ones(32)),
            r"unexpected transformer\.layers\.3\.attn_norm",
        ),
        (_remove("transformer.layers.1.attn.lambda_k2"), r"lacks transformer\.layers\.1\.attn\.lambda_k2"),
        (_remove("anchor_proj.weight"), r"lacks anchor_proj\.weight"),
        (
            _add("anchor_proj.weight", torch.zeros(96, 32)),
            r"anchor_proj\.weight has shape \[96, 32\], expected \[128, 32\]",
        ),
        (_add("lm_head.weight", torch.zeros(65, 32)), r"lm_head\.weight has shape \[65, 32\]"),
        (_set("sparse_attention_enabled", False), "unknown switches sparse_attention_enabled"),
        (_set("norm_pos", "after"), "norm_pos='after'"),
        (_set("act_type", "gelu"), "act_type='gelu'"),
        (_set("qk_norm", False), "qk_norm=False"),
        (_set("rmsnorm_use_bias", True), "rmsnorm_use_bias=True"),
        (_set("clip_qkv", 8.0), r"clip_qkv=8\.0"),
        (_set("logit_soft_cap", 30.0), r"logit_soft_cap=30\.0"),
        (_set("yarn_enabled", True), "yarn_enabled=True"),
        (_set("smear_gate_enabled", True), "smear_gate_enabled=True"),
        (_set("per_layer_backout", True), "per_layer_backout=True"),
        (_set("embedding_layer0_mix_enabled", True), "embedding_layer0_mix_enabled=True"),
        (_set("anchor_delta_enabled", True), "anchor_delta_enabled=True"),
        (_set("residual_mode", "tokenwise"), "'tokenwise' is unknown"),
        (_set("n_head", 0), "n_head=0"),
        (_set("n_layer", "3"), "n_layer='3'"),
        (_set("n_head", 5), "heads of 6 channels at hidden size 32"),
        (lambda raw: raw["model_args"].pop("n_embd"), "lacks n_embd"),
        (lambda raw: raw["model_args"].pop("act_type"), "act_type='gelu'"),
        (lambda raw: raw["model_args"].pop("query_res_enabled"), "lacks query_res_enabled"),
        (lambda raw: raw["model"].update({"note": "text"}), "'note' is a str"),
        (_set("clip_qkv", torch.ones(2)), "clip_qkv is a Tensor"),
        (lambda raw: raw.update(step="seven"), "step is 'seven'"),
        (lambda raw: raw.pop("model_args"), "'model' and 'model_args'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(damage: Callable[[Raw], None], message: str, tmp_path: Path) -> None:
    raw = raw_checkpoint()
    damage(raw)
    path = save(raw, tmp_path)
    with pytest.raises(ReferenceFormatError, match=message) as refusal:
        read_reference_checkpoint(path)
    assert str(refusal.value).startswith(str(path))
    assert "\n" not in str(refusal.value)


class Payload:
    """An object whose unpickling would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_code_in_a_file_is_refused_and_not_run(tmp_path: Path) -> None:
    path = save(raw_checkpoint() | {"config": Payload(tmp_path / "ran")}, tmp_path)
    with pytest.raises(ReferenceFormatError, match="Python objects besides tensors"):
        read_reference_checkpoint(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("keep", [0, 1000])
def test_a_truncated_file_is_refused(keep: int, tmp_path: Path) -> None:
    path = save(raw_checkpoint(), tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ReferenceFormatError, match="truncated"):
        read_reference_checkpoint(path)


@pytest.mark.parametrize(
    ("exo", "sizes", "message"),
    [
        (VARIANTS["e-exoformer-h1"].exo, {}, "no anchor h1"),
        (VARIANTS["e-exoformer-postnorm-vg"].exo, {}, "no post norm of VG"),
        (VARIANTS["gated-qk-bias"].exo, {}, "no control qk-bias"),
        (VARIANTS["gated"].exo, {"num_query_groups": 2}, "no 2 query groups for 4 heads"),
    ],
)
def test_models_that_the_authors_format_cannot_hold_are_refused(exo: ExoConfig, sizes: dict, message: str) -> None:
    all_sizes = dataclasses.replace(golden_values.checkpoint("variants", "gated").sizes, **sizes)
    with pytest.raises(ReferenceFormatError, match=message):
        state_to_reference(exo, all_sizes, {})


def test_projections_are_packed_by_query_group() -> None:
    """4 heads in 2 groups, 1 channel per head; rows numbered in the stacked order q0…q3 k0 k1 v0 v1 g0…g3."""
    sizes = ModelSizes(
        num_layers=1, hidden_size=1, num_attention_heads=4, num_query_groups=2, kv_channels=1, ffn_hidden_size=1,
        vocab_size=1, seq_length=1,
    )  # fmt: skip
    stacked = torch.arange(12.0).view(12, 1)
    ours = torch.tensor([0, 1, 8, 9, 4, 6, 2, 3, 10, 11, 5, 7.0]).view(12, 1)

    fused = PackedProjections("ours", "theirs", sizes, stored="qkvg", kept="qgkv")
    assert torch.equal(fused.to_ours([stacked]), ours)
    assert torch.equal(fused.to_theirs(ours)[0], stacked)

    apart = PackedProjections("ours", ("q", "k", "v", "g"), sizes, stored="qkvg", kept="qgkv")
    blocks = stacked.split([4, 2, 2, 4])
    assert torch.equal(apart.to_ours(blocks), ours)
    assert all(torch.equal(a, b) for a, b in zip(apart.to_theirs(ours), blocks, strict=True))
    assert apart.their_shapes() == [(4, 1), (2, 1), (2, 1), (4, 1)]

    some = PackedProjections("ours", "theirs", sizes, stored="qkvg", kept="gv")
    assert some.to_ours([stacked]).flatten().tolist() == [8, 9, 6, 10, 11, 7]
    assert some.to_theirs(some.to_ours([stacked]))[0].flatten().tolist() == [0, 0, 0, 0, 0, 0, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("mapping", "wrong"),
    [
        (SwappedSwiGLU, lambda self, tensors: tensors[0]),
        (PackedProjections, lambda self, tensors: tensors[0]),
        (SelectedRows, lambda self, tensors: tensors[0].flip(0)),
    ],
    ids=["swiglu halves not swapped", "projections not interleaved", "dynamic outputs in another order"],
)
def test_a_wrong_layout_would_not_go_unnoticed(
    mapping: type, wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = golden_values.expected("variants", "dynamic_exoformer_elementwise")
    monkeypatch.setattr(mapping, "to_ours", wrong)
    model = golden_values.plain_model(golden_values.checkpoint("variants", "dynamic_exoformer_elementwise"))
    assert (model(expected["tokens"]) - expected["logits"]).abs().max() > 0.01


def test_a_state_of_another_model_is_not_exported() -> None:
    source = golden_values.checkpoint("variants", "gated")
    with pytest.raises(ConversionError, match=r"lacks decoder\.layers\.0\.anchor\.g_norm"):
        state_to_reference(VARIANTS["e-exoformer"].exo, source.sizes, source.state)
