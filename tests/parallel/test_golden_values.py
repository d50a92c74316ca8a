"""The Megatron model computes what the author's implementation computes, on every layout of ranks.

Tolerances are those of float32 sums in another order: the author's numbers come from one thread, ours from
differently cut matrices.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_exo.convert.reference import state_to_reference
from tests.golden_values import (
    ADAMW_KEYS,
    RELEASED_NAMES,
    VARIANT_NAMES,
    checkpoint,
    expected,
    learning_rate_scale,
    plain_sizes,
    training_batches,
    training_curves,
)
from tests.layouts import Layout, Trainer, merge
from tests.ranks import run_on_ranks

UNEVEN = {"num_layers_in_first_pipeline_stage": 2}  # the golden models have three layers
LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4),
    Layout(pp=2, transformer=UNEVEN),
    Layout(pp=3),
    Layout(cp=2),
    Layout(tp=2, pp=2, sp=True, transformer=UNEVEN),
]
QUICK = [LAYOUTS[0], LAYOUTS[-1]]
CASES = [("variants", name) for name in VARIANT_NAMES] + [("released_formats", name) for name in RELEASED_NAMES]


def _forward_and_gradients(layout: Layout) -> dict[str, tuple[Tensor | None, dict[str, float] | None, Any]]:
    """For every golden file: logits, losses and whole gradients, on the ranks that have them."""
    results = {}
    for folder, name in CASES:
        source, golden = checkpoint(folder, name), expected(folder, name)
        trainer = Trainer(source.exo, plain_sizes(source.sizes), layout, source.state)
        logits = trainer.logits(golden["tokens"])
        losses = trainer.forward_backward(golden["tokens"], golden["labels"])
        results[f"{folder}/{name}"] = logits, losses, trainer.whole("main_grad")
    return results


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(layout, id=str(layout), marks=[] if layout in QUICK else pytest.mark.slow) for layout in LAYOUTS
    ],
)
def computed(request: pytest.FixtureRequest) -> tuple[Layout, list[dict[str, Any]]]:
    layout = request.param
    return layout, run_on_ranks(layout.world_size, _forward_and_gradients, layout)


def _of_last_stage(results: list[dict[str, Any]], case: str, index: int) -> Any:
    return next(result[case][index] for result in results if result[case][index] is not None)


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_logits_and_losses_are_the_authors(computed: tuple[Layout, list], folder: str, name: str) -> None:
    golden, case = expected(folder, name), f"{folder}/{name}"
    logits, losses = (_of_last_stage(computed[1], case, index) for index in (0, 1))
    assert (logits - golden["logits"]).abs().max() < 2e-5
    assert losses["lm loss"] == pytest.approx(golden["cross_entropy"], abs=2e-5)
    if "z_square_mean" in golden:
        assert losses["z loss"] == pytest.approx(1e-5 * golden["z_square_mean"], abs=2e-5)
        assert losses["lm loss"] + losses["z loss"] == pytest.approx(golden["loss"], abs=2e-5)


@pytest.mark.parametrize("name", VARIANT_NAMES)
def test_every_gradient_norm_is_the_authors(computed: tuple[Layout, list], name: str) -> None:
    source = checkpoint("variants", name)
    gradients = merge([result[f"variants/{name}"][2] for result in computed[1]])
    vocabulary = source.sizes.vocab_size
    gradients = {
        key: gradient[:vocabulary] if "embedding" in key or "output_layer" in key else gradient
        for key, gradient in gradients.items()
    }
    theirs = state_to_reference(source.exo, source.sizes, gradients)
    norms = expected("variants", name)["grad_norms"]
    assert theirs.keys() >= norms.keys()
    for key, norm in norms.items():
        assert float(theirs[key].norm()) == pytest.approx(float(norm), rel=1e-4, abs=1e-6), key


def _train(layout: Layout, key: str) -> list[float]:
    source = checkpoint_of_training(key)
    trainer = Trainer(
        source.exo,
        plain_sizes(source.sizes),
        layout,
        source.state,
        optimizer="adam",
        lr=3e-3,
        clip_grad=1.0,
        adam_eps=1e-8,
    )
    curve = []
    for step, batch in enumerate(training_batches()):
        losses = trainer.forward_backward(batch[:, :-1], batch[:, 1:], micro_batch_size=8)
        assert losses is not None
        curve.append(losses["lm loss"])
        trainer.step(3e-3 * learning_rate_scale(step))
    return curve


def checkpoint_of_training(key: str) -> Any:
    return checkpoint("training", f"{key}.init")


def _train_all(layout: Layout) -> dict[str, list[float]]:
    return {key: _train(layout, key) for key in ADAMW_KEYS}


@pytest.mark.parametrize("layout", [Layout(), pytest.param(Layout(tp=2), marks=pytest.mark.slow)], ids=str)
def test_forty_adamw_steps_follow_the_authors_curve(layout: Layout) -> None:
    for curves in run_on_ranks(layout.world_size, _train_all, layout):
        for key in ADAMW_KEYS:
            theirs = torch.tensor(training_curves(key)["cross_entropy"])
            assert (torch.tensor(curves[key]) - theirs).abs().max() < 1e-3, key
