"""Initial weights depend on the seed and the variant, not on the layout of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_exo.model.initialization import draw
from megatron_exo.variants import VARIANTS
from tests.layouts import Layout, Trainer, merge, transformer_config
from tests.plain_reference import PlainSizes
from tests.ranks import run_on_ranks

SIZES = PlainSizes(num_layers=4, vocab_size=70)  # padded to 80, 96 and 128 rows at tensor-parallel size 1, 2 and 4
NAMES = ["dynamic-e-exoformer", "e-exoformer-h1", "s-nuresformer"]
LAYOUTS = [
    Layout(tp=2, sp=True),
    Layout(pp=2, vpp=2),
    Layout(tp=2, pp=2),
    Layout(tp=4),
    Layout(dp=2, distributed_optimizer=True),
    Layout(cp=2),
]


def _initial(layout: Layout, names: list[str]) -> dict[str, dict[str, Tensor] | None]:
    return {name: Trainer(VARIANTS[name].exo, SIZES, layout).whole("data") for name in names}


def _tokens_only(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Cut the padding of the vocabulary, after seeing that it is zero."""
    state = dict(state)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert not state[name][SIZES.vocab_size :].any()
        state[name] = state[name][: SIZES.vocab_size]
    return state


@pytest.fixture(scope="module")
def single() -> dict[str, dict[str, Tensor]]:
    (states,) = run_on_ranks(1, _initial, Layout(), NAMES)
    return {name: _tokens_only(states[name]) for name in NAMES}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_same_seed_gives_the_same_weights_on_every_layout(layout: Layout, single: dict) -> None:
    results = run_on_ranks(layout.world_size, _initial, layout, NAMES)
    for name in NAMES:
        state = _tokens_only(merge([result[name] for result in results]))
        assert state.keys() == single[name].keys()
        for parameter, tensor in state.items():
            assert torch.equal(tensor, single[name][parameter]), f"{name}: {parameter}"


def test_layers_and_projections_are_drawn_independently(single: dict) -> None:
    state = single["dynamic-e-exoformer"]
    first, second = (state[f"decoder.layers.{n}.self_attention.linear_qkv.weight"] for n in (0, 1))
    anchor = state["decoder.layers.0.anchor.linear_qkv.weight"]
    for a, b in ((first, second), (first, anchor)):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.1


def _first_loss() -> float:
    trainer = Trainer(VARIANTS["dynamic-e-exoformer"].exo, SIZES, Layout())
    tokens = torch.randint(0, SIZES.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = trainer.forward_backward(tokens[:, :-1], tokens[:, 1:])
    assert losses is not None
    return losses["lm loss"]


def test_the_papers_first_loss_is_the_logarithm_of_the_true_vocabulary() -> None:
    (loss,) = run_on_ranks(1, _first_loss)
    assert loss == pytest.approx(math.log(SIZES.vocab_size), abs=1e-6)


def _drawn(name: str, recipe: str, seed: int = 1, shape: tuple[int, int] = (400, 300)) -> Tensor:
    config = transformer_config(VARIANTS["dynamic-e-exoformer"].exo, SIZES, Layout())
    return draw(name, shape, config, recipe, seed)


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
PROJECTION = "decoder.layers.0.self_attention.linear_proj.weight"
DYNAMIC = "decoder.layers.0.self_attention.dynamic_mixing.fc2.weight"


@pytest.mark.parametrize("recipe", ["paper", "reference"])
def test_matrices_are_normal_and_cut_at_three_deviations(recipe: str) -> None:
    weight = _drawn(QKV, recipe)
    assert weight.abs().max() <= 0.06
    assert weight.std() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("name", [PROJECTION, "decoder.layers.3.mlp.linear_fc2.weight", "output_layer.weight"])
def test_residual_projections_and_the_head_start_at_zero_but_not_megatrons(name: str) -> None:
    assert not _drawn(name, "paper").any()
    assert not _drawn(name, "reference").any()
    assert _drawn(name, "megatron").any()


def test_megatrons_recipe_scales_residual_projections_by_depth() -> None:
    assert _drawn(PROJECTION, "megatron").std() == pytest.approx(0.02 / math.sqrt(2 * SIZES.num_layers), rel=0.02)
    assert _drawn(QKV, "megatron").abs().max() > 0.06


def test_only_the_authors_code_draws_the_last_matrix_of_dynamic_mixing() -> None:
    assert not _drawn(DYNAMIC, "paper").any()
    assert not _drawn(DYNAMIC, "megatron").any()
    assert _drawn(DYNAMIC, "reference").any()


def test_another_seed_gives_other_weights() -> None:
    assert torch.equal(_drawn(QKV, "paper", seed=1), _drawn(QKV, "paper", seed=1))
    assert not torch.equal(_drawn(QKV, "paper", seed=1), _drawn(QKV, "paper", seed=2))
