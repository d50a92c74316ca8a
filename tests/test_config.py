"""The axes of variation: what they mean, which contradict each other, and the variants that have names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron_exo.config import ANCHORS, PATHWAYS, ExoConfig, ExoConfigError, parse_pathways
from megatron_exo.errors import UserError
from megatron_exo.variants import VARIANTS, get_variant, name_of

EXO: dict[str, Any] = {"gate": "elementwise", "anchor": "h0", "pathways": "qkvg", "anchor_norm": "qkvg"}

# -- subsets of pathways ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "canonical"),
    [("gvkq", "qkvg"), ("V,G", "vg"), ("q, k", "qk"), ("all", "qkvg"), ("none", ""), ("", ""), ("ALL", "qkvg")],
)
def test_a_subset_of_pathways_has_one_canonical_form(written: str, canonical: str) -> None:
    assert parse_pathways(written) == canonical
    assert parse_pathways(canonical) == canonical


@pytest.mark.parametrize("wrong", ["x", "qq", "qkvgo", "anchor", "q;v"])
def test_what_is_no_subset_of_pathways_is_refused_with_an_example(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"is not a subset of the pathways Q, K, V, G; write for example 'qkvg'"):
        parse_pathways(wrong)


def test_configurations_are_equal_however_their_pathways_are_written() -> None:
    assert ExoConfig(**EXO) == ExoConfig(**EXO | {"pathways": "G,V,K,Q", "anchor_norm": "all"})


# -- contradictions ---------------------------------------------------------------------------------------------

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"gate": "headwise"}, r"exo gate 'headwise' is unknown; choose one of none, elementwise"),
    ({"anchor": "h3"}, r"exo anchor 'h3' is unknown; choose one of none, internal, h0, h1, h2"),
    ({"granularity": "tokenwise"}, r"exo granularity 'tokenwise' is unknown; choose one of scalar"),
    ({"mixing": "learned"}, r"exo mixing 'learned' is unknown; choose one of static, dynamic"),
    ({"anchor_weights": "random"}, r"exo anchor weights 'random' is unknown; choose one of learned, frozen"),
    ({"control": "bias"}, r"exo control 'bias' is unknown; choose one of none, qk-bias"),
    ({"pathways": "xyz"}, r"exo pathways: 'xyz' is not a subset"),
    ({"drop_anchor": "qq"}, r"exo drop anchor: 'qq' is not a subset"),
    ({"dynamic_hidden_size": 0}, r"exo dynamic hidden size must be at least 1, not 0"),
    ({"pathways": "v"}, r"exo pathways 'v' has no effect without an anchor; choose an anchor .* give it as 'none'"),
    ({"anchor_norm": "v"}, r"exo anchor norm 'v' has no effect without an anchor"),
    ({"post_norm": "v"}, r"exo post norm 'v' has no effect without an anchor"),
    ({"mixing": "dynamic"}, r"exo mixing 'dynamic' has no effect without an anchor; .* give it as 'static'"),
    ({"anchor_weights": "frozen"}, r"exo anchor weights 'frozen' has no effect without an anchor; .* 'learned'"),
    ({"drop_anchor": "v"}, r"exo drop anchor 'v' has no effect without an anchor"),
    ({"drop_current": "v"}, r"exo drop current 'v' has no effect without an anchor"),
    ({"granularity": "scalar"}, r"exo granularity 'scalar' has no effect without an anchor; .* 'elementwise'"),
    ({"control": "qk-bias", "granularity": "scalar"}, r"exo granularity 'scalar' has no effect without an anchor"),
    ({"anchor": "h0"}, r"mixed into no pathway does nothing; give pathways such as 'qkvg', or anchor 'none'"),
    ({"anchor": "h0", "pathways": "vg"}, r"pathway G is mixed but the model has no gate; use --exo-gate elementwise"),
    (EXO | {"pathways": "vg"}, r"exo anchor norm names QK, which is not mixed \(pathways 'vg'\); name only mixed"),
    (EXO | {"pathways": "qkg", "anchor_norm": "", "post_norm": "v"}, r"exo post norm names V, which is not mixed"),
    (EXO | {"pathways": "qkv", "anchor_norm": "", "drop_anchor": "g"}, r"exo drop anchor names G, which is not mixed"),
    (EXO | {"pathways": "qkv", "anchor_norm": "", "drop_current": "g"}, r"exo drop current names G, which is not"),
    (EXO | {"post_norm": "q"}, r"Q and K are always normalised after mixing \(QK-norm\); exo post norm takes only"),
    (EXO | {"drop_anchor": "qv", "drop_current": "v"}, r"dropping both terms of one pathway leaves nothing of it"),
    (EXO | {"anchor": "internal", "anchor_weights": "frozen"}, r"internal anchor has no matrices .*; use anchor h0"),
    (EXO | {"control": "qk-bias"}, r"control 'qk-bias' stands in place of the anchor; use anchor 'none' with it"),
    ({"control": "embedding-residual", "granularity": "headwise"}, r"the residual stream has no heads; use"),
]


@pytest.mark.parametrize(("axes", "message"), CONTRADICTIONS, ids=[message[:40] for _, message in CONTRADICTIONS])
def test_a_contradiction_is_refused_with_what_to_do(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExoConfigError, match=message) as refusal:
        ExoConfig(**axes)
    assert isinstance(refusal.value, UserError)  # so that programs show it as one line
    assert "\n" not in str(refusal.value)


def test_changing_an_axis_is_checked_like_choosing_it() -> None:
    with pytest.raises(ExoConfigError, match="has no effect without an anchor"):
        VARIANTS["e-exoformer"].exo.replace(anchor="none")


def test_a_configuration_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ExoConfig().gate = "elementwise"  # type: ignore[misc]


# -- what follows from the axes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("anchor", "source_layer", "first_mixed_layer", "is_exogenous"),
    [("none", None, 1, False), ("internal", 1, 2, False), ("h0", 1, 1, True), ("h1", 1, 2, True), ("h2", 2, 3, True)],
)
def test_layers_up_to_the_source_are_not_mixed(
    anchor: str, source_layer: int | None, first_mixed_layer: int, is_exogenous: bool
) -> None:
    exo = ExoConfig(anchor=anchor, pathways="" if anchor == "none" else "v")
    assert (exo.source_layer, exo.first_mixed_layer) == (source_layer, first_mixed_layer)
    assert exo.is_exogenous is is_exogenous
    mixed = [layer for layer in range(1, 6) if exo.mixes(layer)]
    assert mixed == ([] if anchor == "none" else list(range(first_mixed_layer, 6)))


def test_the_table_of_layers_covers_every_anchor() -> None:
    assert ANCHORS == ("none", "internal", "h0", "h1", "h2")


def test_the_embedding_residual_needs_the_embeddings_of_layer_1_but_mixes_nothing() -> None:
    exo = ExoConfig(control="embedding-residual")
    assert exo.source_layer == 1
    assert not any(exo.mixes(layer) for layer in range(1, 6))


def test_coefficients_start_so_that_both_terms_weigh_a_half() -> None:
    assert VARIANTS["e-exoformer"].exo.lambda_init == 0.5
    assert VARIANTS["dynamic-e-exoformer"].exo.lambda_init == 1.0  # times γ = 0.5


@pytest.mark.parametrize(("gate", "pathways", "outputs"), [("elementwise", "qkvg", 8), ("none", "qkv", 6)])
def test_dynamic_mixing_has_two_scalars_for_each_mixed_pathway(gate: str, pathways: str, outputs: int) -> None:
    exo = ExoConfig(gate=gate, anchor="h0", pathways=pathways, mixing="dynamic")
    assert exo.num_dynamic_outputs == outputs


def test_a_gate_is_one_more_projection_between_query_and_key() -> None:
    assert (ExoConfig().components, ExoConfig(gate="elementwise").components) == ("qkv", "qgkv")


@pytest.mark.parametrize(
    ("axes", "description"),
    [
        ({}, "gate none, no anchor"),
        ({"gate": "elementwise"}, "gate elementwise, no anchor"),
        ({"control": "qk-bias"}, "gate none, no anchor, control qk-bias"),
        (EXO, "gate elementwise, anchor h0, mixes QKVG elementwise static, anchor norm QKVG"),
        (
            {"anchor": "internal", "pathways": "v", "granularity": "scalar"},
            "gate none, anchor internal, mixes V scalar static, anchor norm none",
        ),
        (
            EXO | {"mixing": "dynamic", "anchor_weights": "frozen", "post_norm": "vg"},
            "gate elementwise, anchor h0 (frozen), mixes QKVG elementwise dynamic, anchor norm QKVG, post-norm VG",
        ),
        (
            EXO | {"drop_anchor": "qk", "drop_current": "v"},
            "gate elementwise, anchor h0, mixes QKVG elementwise static, anchor norm QKVG, "
            "without anchor term of QK, without current term of V",
        ),
    ],
)
def test_a_description_names_gate_and_anchor_and_what_differs_from_the_plain_model(
    axes: dict[str, Any], description: str
) -> None:
    assert ExoConfig(**axes).describe() == description


# -- named variants ---------------------------------------------------------------------------------------------

NAMES = """base gated resformer gated-resformer s-nuresformer h-nuresformer e-nuresformer s-nuresformer-qk-norm
s-exoformer h-exoformer e-exoformer e-exoformer-no-norm e-exoformer-vg e-exoformer-postnorm-v e-exoformer-postnorm-vg
e-exoformer-h1 dynamic-s-exoformer dynamic-h-exoformer dynamic-e-exoformer dynamic-e-exoformer-h1
dynamic-e-exoformer-h2 dynamic-s-nuresformer dynamic-h-nuresformer dynamic-e-nuresformer e-exoformer-frozen-anchor
dynamic-e-exoformer-frozen-anchor gated-qk-bias gated-embedding-residual""".split()


def test_every_variant_of_the_paper_has_its_name() -> None:
    assert sorted(VARIANTS) == sorted(NAMES)


def test_no_two_names_stand_for_the_same_model() -> None:
    assert len({variant.exo for variant in VARIANTS.values()}) == len(VARIANTS)
    for name, variant in VARIANTS.items():
        assert (variant.name, name_of(variant.exo)) == (name, name)


def test_a_point_without_a_name_has_none() -> None:
    assert name_of(VARIANTS["e-exoformer"].exo.replace(drop_anchor="v")) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_its_variant_is(name: str) -> None:
    exo = VARIANTS[name].exo
    parts = name.split("-")
    anchor = next((part for part in ("h1", "h2") if part in parts), "h0" if "exoformer" in parts else "none")
    assert exo.anchor == ("internal" if name.endswith("resformer") or "nuresformer" in parts else anchor)
    assert exo.mixing == ("dynamic" if "dynamic" in parts else "static")
    assert exo.anchor_weights == ("frozen" if "frozen" in parts else "learned")
    if family := {"exoformer", "nuresformer"} & set(parts):
        letter = parts[parts.index(family.pop()) - 1]
        assert exo.granularity == {"s": "scalar", "h": "headwise", "e": "elementwise"}[letter]
        assert exo.gate == "elementwise"
        assert exo.pathways == ("vg" if name.endswith("-vg") and "postnorm" not in parts else PATHWAYS)
    else:
        assert exo.gate == ("elementwise" if "gated" in parts else "none")
        assert exo.pathways == ("v" if "resformer" in parts else "")


@pytest.mark.parametrize(
    ("name", "axes", "perplexity", "accuracy"),
    [
        ("base", {}, 14.79, 48.14),
        ("gated", {"gate": "elementwise"}, 14.64, 48.80),
        ("resformer", {"anchor": "internal", "pathways": "v", "granularity": "scalar"}, 14.32, 49.65),
        ("e-exoformer", EXO, 14.13, 49.85),
        ("e-exoformer-no-norm", EXO | {"anchor_norm": ""}, 14.30, None),
        ("e-exoformer-postnorm-v", EXO | {"post_norm": "v"}, 14.08, None),
        ("e-exoformer-postnorm-vg", EXO | {"post_norm": "vg"}, 14.07, None),
        ("e-exoformer-h1", EXO | {"anchor": "h1"}, 14.07, None),
        ("e-nuresformer", EXO | {"anchor": "internal"}, 14.15, 49.68),
        (
            "s-nuresformer-qk-norm",
            EXO | {"anchor": "internal", "granularity": "scalar", "anchor_norm": "qk"},
            None,
            49.83,
        ),
        ("dynamic-e-exoformer", EXO | {"mixing": "dynamic"}, 14.09, 50.27),
        ("dynamic-e-exoformer-h1", EXO | {"mixing": "dynamic", "anchor": "h1"}, 14.02, None),
        ("gated-embedding-residual", {"gate": "elementwise", "control": "embedding-residual"}, None, None),
    ],
)
def test_a_variant_has_the_papers_axes_and_figures(
    name: str, axes: dict[str, Any], perplexity: float | None, accuracy: float | None
) -> None:
    variant = get_variant(name)
    assert variant.exo == ExoConfig(**axes)
    assert (variant.reported_perplexity, variant.reported_accuracy) == (perplexity, accuracy)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("e-exofromer", "did you mean e-exoformer"), ("resformr", "did you mean resformer"), ("zzz", "see --help")],
)
def test_an_unknown_variant_is_answered_with_the_nearest_names(wrong: str, hint: str) -> None:
    with pytest.raises(ExoConfigError, match=f"unknown variant '{wrong}'; {hint}"):
        get_variant(wrong)
