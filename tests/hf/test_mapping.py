"""One table of names serves both directions, and covers every parameter of every variant."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from megatron_exo.config import ExoConfigError
from megatron_exo.convert.hugging_face import from_hf_config, hf_config, hf_mapping
from megatron_exo.convert.mapping import ConversionError, export_state, import_state
from megatron_exo.hf import ExoFormerConfig
from megatron_exo.sizes import ModelSizes
from tests.golden_values import plain_sizes
from tests.hf.models import GROUPED, SIZES, VARIANTS_AND_MORE, empty_model, our_state
from tests.plain_reference import parameter_shapes

ALL_SIZES = {
    "multi-head": SIZES,
    "grouped": GROUPED,
    "tied, of an odd vocabulary": dataclasses.replace(SIZES, tied_embeddings=True, vocab_size=57),
}


@pytest.mark.parametrize("sizes", ALL_SIZES.values(), ids=ALL_SIZES)
@pytest.mark.parametrize("name", VARIANTS_AND_MORE)
def test_the_table_covers_every_key_of_every_variant(name: str, sizes: ModelSizes) -> None:
    """Both models' parameters, no more and no less, each once and in its shape."""
    exo = VARIANTS_AND_MORE[name]
    table = hf_mapping(exo, sizes)
    assert len({row.ours for row in table}) == len(table)
    assert {row.ours: row.our_shape() for row in table} == parameter_shapes(exo, plain_sizes(sizes))

    theirs = [(n, s) for row in table for n, s in zip(row.their_names, row.their_shapes(), strict=True)]
    assert len(dict(theirs)) == len(theirs)
    with torch.device("meta"):
        model = empty_model(exo, sizes)
    assert {n: tuple(s) for n, s in theirs} == {n: tuple(p.shape) for n, p in model.named_parameters()}


@pytest.mark.parametrize("sizes", ALL_SIZES.values(), ids=ALL_SIZES)
@pytest.mark.parametrize("name", VARIANTS_AND_MORE)
def test_weights_survive_the_way_there_and_back_exactly(name: str, sizes: ModelSizes) -> None:
    exo = VARIANTS_AND_MORE[name]
    table, state = hf_mapping(exo, sizes), our_state(exo, sizes)
    theirs = export_state(table, state)
    back = import_state(table, theirs)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)
    assert sum(tensor.numel() for tensor in theirs.values()) == sum(tensor.numel() for tensor in state.values())
    assert not any(row.dropped() for row in table)


@pytest.mark.parametrize("sizes", ALL_SIZES.values(), ids=ALL_SIZES)
@pytest.mark.parametrize("name", VARIANTS_AND_MORE)
def test_configurations_survive_the_way_there_and_back(name: str, sizes: ModelSizes) -> None:
    exo = VARIANTS_AND_MORE[name]
    config = ExoFormerConfig(**hf_config(exo, sizes))
    assert from_hf_config(json.loads(config.to_json_string(use_diff=False))) == (exo, sizes)
    assert from_hf_config(json.loads(config.to_json_string())) == (exo, sizes)


def test_a_key_that_the_table_lacks_is_named() -> None:
    exo = VARIANTS_AND_MORE["e-exoformer"]
    table, state = hf_mapping(exo, SIZES), our_state(exo)
    with pytest.raises(ConversionError, match="has unexpected extra"):
        export_state(table, state | {"extra": torch.ones(1)})
    theirs = export_state(table, state)
    del theirs["model.anchor.k_proj.weight"]
    with pytest.raises(ConversionError, match=r"lacks model\.anchor\.k_proj\.weight"):
        import_state(table, theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "'llama' model"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers='3'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "default"}}, "lacks rope_theta"),
        ({"gate": 1}, "gate=1"),
    ],
)
def test_configurations_that_are_not_ours_are_refused(changes: dict[str, Any], message: str) -> None:
    config = hf_config(VARIANTS_AND_MORE["e-exoformer"], SIZES) | changes
    with pytest.raises(ConversionError, match=message):
        from_hf_config(config)


def test_missing_fields_and_contradictions_are_refused() -> None:
    config = hf_config(VARIANTS_AND_MORE["e-exoformer"], SIZES)
    with pytest.raises(ConversionError, match="lacks granularity"):
        from_hf_config({name: value for name, value in config.items() if name != "granularity"})
    with pytest.raises(ExoConfigError, match="pathway G"):
        from_hf_config(config | {"gate": "none"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": "sigmoid"}, "gate is 'sigmoid'"),
        ({"gate": "none"}, "pathways 'qkvg'"),
        ({"anchor": "none"}, "anchor 'none' with pathways"),
        ({"pathways": "", "anchor_norm": ""}, "anchor 'h0' with pathways ''"),
        ({"pathways": "vg"}, "anchor_norm 'qkvg' names pathways"),
        ({"post_norm": "q"}, "always normalised"),
        ({"drop_anchor": "v", "drop_current": "v"}, "nothing would be left"),
        ({"anchor": "h2", "num_hidden_layers": 2}, "only 2 layers"),
        ({"control": "qk-bias"}, "stands in place of the anchor"),
    ],
)
def test_the_hugging_face_configuration_refuses_contradictions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExoFormerConfig(**changes)
