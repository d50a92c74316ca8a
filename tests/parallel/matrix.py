"""Layouts of ranks, enumerated, and what a model does on one of them, to be held against a single process.

A *point* of the matrix is a variant on a layout under a reduction of gradients (``REDUCTIONS``) and a recompute mode
(``RECOMPUTE``). One model serves several recompute modes: its optimizer steps run under them in turn, and the loss and
every gradient of each step are compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from megatron_exo.config import ExoConfig
from megatron_exo.shards import EMBEDDING, named_shards
from megatron_exo.variants import VARIANTS
from tests.layouts import Layout, Trainer, merge
from tests.plain_reference import PlainSizes

MHA = PlainSizes(num_layers=4, vocab_size=70)  # padded to 80, 96 and 128 rows at tensor-parallel size 1, 2 and 4
GQA = dataclasses.replace(MHA, num_attention_heads=8, num_query_groups=4)
CASES: dict[str, tuple[ExoConfig, PlainSizes]] = {
    "static": (VARIANTS["e-exoformer"].exo, MHA),
    "dynamic": (VARIANTS["dynamic-e-exoformer"].exo, MHA),
    "internal": (VARIANTS["s-nuresformer"].exo, MHA),
    "h1": (VARIANTS["dynamic-e-exoformer-h1"].exo, MHA),
    "gqa": (VARIANTS["h-exoformer"].exo, GQA),
}
"""Each kind of source, of mixing and of granularity."""

REDUCTIONS: dict[str, dict[str, bool]] = {
    "all-reduce": {},
    "distributed optimizer": {"distributed_optimizer": True},
    "overlap": {"distributed_optimizer": True, "overlap": True},
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "uniform 1": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "uniform 2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}
_STEPS = ["none", "uniform 1", "uniform 2", "block", "none"]
"""Recompute mode of each step; ``selective`` is fixed when a layer is built, so another model takes it."""

INIT = "megatron"
"""The recipe without zero matrices, behind which the first steps would leave most gradients zero."""
LEARNING_RATE = 1e-2
# Adam divides by the root of the second moment: where a gradient is rounding noise, so is the sign of its step. An
# epsilon far above that noise keeps the comparison about the gradients.
_ADAM: dict[str, Any] = {"optimizer": "adam", "lr": LEARNING_RATE, "adam_eps": 1e-3}


def layouts(world_sizes: range) -> Iterator[Layout]:
    """Every layout of the matrix that runs on so many ranks."""
    for tp, sp, pp, vpp, dp, cp in product((1, 2, 4), (False, True), (1, 2, 4), (1, 2), (1, 2), (1, 2)):
        layout = Layout(tp=tp, sp=sp, pp=pp, vpp=vpp, dp=dp, cp=cp)
        if layout.world_size in world_sizes and not (sp and tp == 1) and not (vpp > 1 and pp == 1):
            yield layout


def layouts_with_source_wire(world_sizes: range) -> Iterator[Layout]:
    """The layouts whose stages may send the anchor's source instead of the anchor."""
    for layout in layouts(world_sizes):
        if layout.pp > 1 and layout.vpp == 1:
            yield dataclasses.replace(layout, wire="source")


def reductions(layout: Layout) -> list[str]:
    """Ways to reduce gradients that differ on this layout."""
    return list(REDUCTIONS) if layout.dp * layout.cp > 1 else ["all-reduce"]


def _deep(sizes: PlainSizes, layout: Layout, num_layers: int | None) -> PlainSizes:
    return dataclasses.replace(sizes, num_layers=num_layers or max(4, layout.pp * layout.vpp))


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels int64 [4, 16]."""
    tokens = torch.randint(0, MHA.vocab_size, (4, 17), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


def run_points(
    layout: Layout,
    points: list[tuple[str, str]],
    fault: Callable[[], None] | None = None,
    num_layers: int | None = None,
) -> dict[tuple[str, str], dict[str, Any]]:
    """Train each case from its own initial weights; call it on every rank.

    Args:
        points: (case, reduction) of each model.
        fault: plants a fault in this process first (negative controls).
        num_layers: of the model; four, or as many as the layout has chunks, if not given.

    Returns:
        (case, reduction) → what this rank knows of ``losses`` (each step), ``gradients`` (each step, whole tensors),
        ``parameters`` (after the steps) and ``norms`` (of the gradient, each step).
    """
    if fault is not None:
        fault()
    results = {}
    for case, way in points:
        exo, sizes = CASES[case]
        spread = dataclasses.replace(layout, **REDUCTIONS[way])
        sizes = _deep(sizes, layout, num_layers)
        trainer = Trainer(exo, sizes, spread, init_recipe=INIT, **_ADAM)
        result: dict[str, Any] = {"losses": {}, "gradients": {}, "norms": {}}
        for number, mode in enumerate(_STEPS):
            for name, value in ({"recompute_granularity": None} | RECOMPUTE[mode]).items():
                setattr(trainer.config, name, value)
            step = f"step {number} ({mode})"
            result["losses"][step] = _loss(trainer, layout)
            result["gradients"][step] = trainer.whole("main_grad")
            result["norms"][step], _ = trainer.step(LEARNING_RATE)
        result["parameters"] = trainer.whole("data")

        selective = dataclasses.replace(spread, transformer=RECOMPUTE["selective"])
        trainer = Trainer(exo, sizes, selective, init_recipe=INIT)
        result["losses"]["step 0 (selective)"] = _loss(trainer, layout)
        result["gradients"]["step 0 (selective)"] = trainer.whole("main_grad")
        results[case, way] = result
    return results


REPLICATED = (
    VARIANTS["dynamic-e-exoformer"].exo.replace(granularity="scalar", post_norm="vg"),
    dataclasses.replace(MHA, tied=True),
)
"""Every kind of parameter that ranks hold copies of: scalar λ, the dynamic MLP, all gains, tied embeddings."""


def run_long(
    layout: Layout, num_layers: int | None = None
) -> tuple[list[float | None], dict[tuple[str, int | None], str]]:
    """Train :data:`REPLICATED` with the ordinary Adam, gradients reduced as :func:`reductions` has it last.

    Returns:
        The loss of every step, and (name, tensor-parallel rank if sharded) → digest of the bits of every parameter.
    """
    exo, sizes = REPLICATED
    spread = dataclasses.replace(layout, **REDUCTIONS[reductions(layout)[-1]])
    trainer = Trainer(exo, _deep(sizes, layout, num_layers), spread, optimizer="adam", lr=1e-3)
    losses = []
    for _ in range(20):
        losses.append(_loss(trainer, layout))
        trainer.step(1e-3)
    trainer.gather_parameters()
    digests = {}
    for name, shard in named_shards(trainer.chunks):
        name = EMBEDDING if name == "output_layer.weight" else name
        rank = trainer.pg_collection.tp.rank() if getattr(shard, "tensor_model_parallel", False) else None
        digests[name, rank] = hashlib.sha256(shard.detach().numpy().tobytes()).hexdigest()
    return losses, digests


def run_bf16(layout: Layout, cases: list[str]) -> dict[str, tuple[float | None, Any]]:
    """First loss and gradients, of weights and activations in bf16 under fp32 masters."""
    results = {}
    for case in cases:
        exo, sizes = CASES[case]
        spread = dataclasses.replace(layout, bf16=True, **REDUCTIONS[reductions(layout)[-1]])
        trainer = Trainer(exo, _deep(sizes, layout, None), spread, init_recipe=INIT, **_ADAM)
        results[case] = _loss(trainer, layout), trainer.whole("main_grad")
    return results


def _loss(trainer: Trainer, layout: Layout) -> float | None:
    """Forward and backward over the batch; micro-batches of one where stages need several."""
    losses = trainer.forward_backward(*batch(), micro_batch_size=1 if layout.pp > 1 else 2)
    return None if losses is None else losses["lm loss"]


def gathered(ranks: list[dict[tuple[str, str], dict[str, Any]]], point: tuple[str, str]) -> dict[str, Any]:
    """One result from the parts that ranks know."""
    parts = [rank[point] for rank in ranks]
    last_stage = next(part for part in parts if None not in part["losses"].values())
    return {
        "losses": last_stage["losses"],
        "norms": parts[0]["norms"],
        "gradients": {step: merge([part["gradients"][step] for part in parts]) for step in parts[0]["gradients"]},
        "parameters": merge([part["parameters"] for part in parts]),
    }


def differences(ours: dict[str, Any], single: dict[str, Any], tolerance: float = 1e-5) -> list[str]:
    """What is not the single process's, in words; empty where all is the same."""
    found = []
    for what in ("losses", "norms"):
        for step, value in ours[what].items():
            expected = single[what][step]
            if not abs(value - expected) <= tolerance * abs(expected):
                found.append(f"{what} of {step}: {value:.7f}, not {expected:.7f}")
    for step, gradients in ours["gradients"].items():
        off = difference_of_tensors(gradients, single["gradients"][step], tolerance, floor=1e-7)
        found += [f"gradient in {step} of {text}" for text in off]
    off = difference_of_tensors(ours["parameters"], single["parameters"], tolerance, floor=0.0)
    return found + [f"parameter {text}" for text in off]


def difference_of_tensors(
    ours: dict[str, Tensor], single: dict[str, Tensor], tolerance: float, floor: float
) -> list[str]:
    """Tensors that are not the single process's, which pads the vocabulary less than other layouts may.

    Args:
        tolerance: for the norm of the difference, relative to the norm of the tensor.
        floor: relative to the largest norm of all; the rounding of a sum is relative to its terms, and where they
            cancel, as in the gradient of a scalar λ over all channels, the sum is small beside them.
    """
    found = []
    if ours.keys() != single.keys():
        found.append(f"names that only one has: {sorted(ours.keys() ^ single.keys())}")
    scale = max(float(tensor.norm()) for tensor in single.values())
    for name in ours.keys() & single.keys():
        mine, expected = ours[name], single[name]
        if name in (EMBEDDING, "output_layer.weight"):
            mine, expected = mine[: MHA.vocab_size], expected[: MHA.vocab_size]
        error, size = float((mine - expected).norm()), float(expected.norm())
        if not error <= tolerance * size + floor * scale:
            found.append(f"{name}: off by {error:.1e} of {size:.1e}")
    return found
