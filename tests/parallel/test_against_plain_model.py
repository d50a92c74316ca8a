"""Every variant, those without golden values too, matches the plain single-file model on every layout.

Compared are the loss, every gradient as a whole tensor, and every parameter after optimizer steps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_exo.config import ExoConfig
from megatron_exo.variants import VARIANTS
from tests.layouts import Z_LOSS_WEIGHT, Layout, Trainer, merge
from tests.plain_reference import PlainExoFormer, PlainSizes, loss, random_state
from tests.ranks import run_on_ranks

MHA = PlainSizes(num_layers=4)
GQA = PlainSizes(num_layers=4, num_attention_heads=8, num_query_groups=4)
_FULL = VARIANTS["dynamic-e-exoformer"].exo
CASES: dict[str, tuple[ExoConfig, PlainSizes]] = {name: (variant.exo, MHA) for name, variant in VARIANTS.items()} | {
    "gqa dynamic-e-exoformer": (_FULL, GQA),
    "gqa e-nuresformer": (VARIANTS["e-nuresformer"].exo, GQA),
    "gqa h-exoformer": (VARIANTS["h-exoformer"].exo, GQA),
    "gqa gated-qk-bias": (VARIANTS["gated-qk-bias"].exo, GQA),
    "qk norm, vg pathways": (_FULL.replace(pathways="kg", anchor_norm="k", post_norm="g"), MHA),
    "ungated h2, q and v": (
        ExoConfig(anchor="h2", pathways="qv", anchor_norm="v", granularity="headwise", mixing="dynamic"),
        GQA,
    ),
    "internal, g alone": (ExoConfig(gate="elementwise", anchor="internal", pathways="g", granularity="scalar"), MHA),
    "scalar embedding residual": (ExoConfig(control="embedding-residual", granularity="scalar"), MHA),
    "dropped terms": (_FULL.replace(drop_anchor="qg", drop_current="v"), MHA),
}
LAYOUTS = [
    Layout(),
    Layout(tp=2, pp=2, vpp=2, sp=True),
    Layout(dp=2, pp=2, distributed_optimizer=True, overlap=True),
    Layout(
        cp=2, transformer={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
    ),
]
"""One of each kind of parallelism for all variants; ``test_matrix.py`` has every combination, for some variants."""
QUICK_LAYOUTS = [LAYOUTS[0], LAYOUTS[1]]
QUICK_CASES = [
    "e-exoformer",
    "dynamic-e-exoformer-h1",
    "s-nuresformer",
    "gated-embedding-residual",
    "gqa dynamic-e-exoformer",
]
# Adam divides by the root of the second moment: where a gradient is rounding noise, so is the sign of the step. An
# epsilon far above that noise keeps the comparison about the gradients.
ADAM = {"optimizer": "adam", "lr": 1e-2, "adam_eps": 1e-3}
STEPS = 2


def _batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, MHA.vocab_size, (4, 17), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


def _run(layout: Layout, names: list[str]) -> dict[str, tuple[Any, Any, Any]]:
    results = {}
    for name in names:
        exo, sizes = CASES[name]
        trainer = Trainer(exo, sizes, layout, random_state(exo, sizes, seed=7), **ADAM)
        losses = trainer.forward_backward(*_batch())
        gradients = trainer.whole("main_grad")
        for step in range(STEPS):
            if step:
                trainer.forward_backward(*_batch())
            trainer.step(ADAM["lr"])
        results[name] = losses, gradients, trainer.whole("data")
    return results


@lru_cache
def _plain(name: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and parameters after the steps, of the plain model."""
    exo, sizes = CASES[name]
    model = PlainExoFormer(exo, sizes)
    model.load_state_dict(random_state(exo, sizes, seed=7))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=ADAM["lr"],
        betas=(0.9, 0.95),
        eps=ADAM["adam_eps"],
        weight_decay=0.0,
    )
    tokens, labels = _batch()
    for step in range(STEPS):
        optimizer.zero_grad()
        total, cross_entropy, _ = loss(model(tokens), labels, Z_LOSS_WEIGHT)
        total.backward()
        if step == 0:
            first = float(cross_entropy)
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return first, gradients, {name: p.detach() for name, p in model.named_parameters()}


def _assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str, tolerance: float) -> None:
    assert ours.keys() >= theirs.keys(), what
    for name in ours.keys() - theirs.keys():  # what a dropped term leaves unused has no gradient there, zero here
        assert not ours[name].any(), f"{what} of {name} is not zero"
    for name, tensor in theirs.items():
        error = (ours[name][: tensor.shape[0]] - tensor).norm()  # the vocabulary is padded
        # The absolute part is for sums that nearly cancel, such as the gradient of a scalar λ over all channels.
        assert error < tolerance * tensor.norm() + 1e-6, f"{what} of {name} is off by {error:.1e}"


def _cases(layout: Layout) -> list[str]:
    """All, but that Megatron's overlapped reduction waits for the gradient of every parameter, and a model with
    dropped terms, an intervention at inference, has parameters without."""
    return [name for name in CASES if not (layout.overlap and name == "dropped terms")]


def _params() -> list[Any]:
    return [pytest.param(layout, QUICK_CASES, id=f"{layout}-quick") for layout in QUICK_LAYOUTS] + [
        pytest.param(layout, _cases(layout), id=str(layout), marks=pytest.mark.slow) for layout in LAYOUTS
    ]


@pytest.mark.parametrize(("layout", "names"), _params())
def test_loss_gradients_and_steps_are_those_of_the_plain_model(layout: Layout, names: list[str]) -> None:
    results = run_on_ranks(layout.world_size, _run, layout, names, timeout_s=600)
    for name in names:
        plain_loss, plain_gradients, plain_parameters = _plain(name)
        losses = next(result[name][0] for result in results if result[name][0] is not None)
        assert losses["lm loss"] == pytest.approx(plain_loss, abs=1e-5), name
        _assert_same(merge([result[name][1] for result in results]), plain_gradients, f"{name}: gradient", 1e-4)
        _assert_same(merge([result[name][2] for result in results]), plain_parameters, f"{name}: parameter", 1e-5)
