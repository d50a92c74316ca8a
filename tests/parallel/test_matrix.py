"""Every layout of ranks trains the same model: from the same seed, each point of the matrix is the single process.

What is compared, and how closely, is in ``matrix.py``. `--all` runs every layout on one to four ranks and some on
eight; the quick tier a subset in which every value of every axis occurs. A layout on one or two ranks is run with every
case, on four with three cases that change from layout to layout, all under its last way to reduce gradients; two of
them, changing too, under each other way.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from tests.layouts import Layout, merge
from tests.parallel.matrix import (
    CASES,
    RECOMPUTE,
    REDUCTIONS,
    difference_of_tensors,
    differences,
    gathered,
    layouts,
    layouts_with_source_wire,
    reductions,
    run_bf16,
    run_long,
    run_points,
)
from tests.ranks import run_on_ranks

ALL = list(layouts(range(1, 5)))
SOURCE_WIRE = list(layouts_with_source_wire(range(1, 5)))
WITH_SOURCE = [case for case in CASES if case != "internal"]
"""The internal anchor has no source that could travel."""
QUICK: dict[Layout, list[str]] = {
    Layout(tp=2, sp=True, pp=2, vpp=2): ["dynamic", "internal", "gqa"],
    Layout(dp=2, cp=2): ["static", "h1"],
    Layout(pp=4): ["static", "h1"],
    Layout(tp=4): ["internal"],
    Layout(pp=2, dp=2, wire="source"): ["h1"],
}
UNEVEN: dict[Layout, list[str]] = {
    Layout(pp=2, transformer={"pipeline_model_parallel_layout": "Ettt|tL"}): ["dynamic", "h1", "internal"],
    Layout(pp=2, wire="source", transformer={"pipeline_model_parallel_layout": "Et|tttL"}): ["dynamic", "h1"],
}
ON_EIGHT: dict[Layout, list[str]] = {
    Layout(tp=2, sp=True, pp=2, dp=2): ["dynamic"],
    Layout(pp=2, vpp=2, dp=2, cp=2): ["h1"],
    Layout(tp=4, sp=True, cp=2): ["gqa"],
}
BY_FOURS = [
    layout
    for layout in ALL
    if layout.world_size == 4 and layout.cp == 1 and layout.sp is (layout.tp > 1) and (layout.vpp == 1 or layout.dp > 1)
] + [Layout(tp=2, pp=2), Layout(tp=2, sp=True, pp=2, wire="source"), Layout(tp=2, cp=2), Layout(dp=2, cp=2)]
"""Layouts for the longer runs: every two kinds of parallelism at once."""
LONG = {Layout(tp=2, sp=True, pp=2, wire="source"), Layout(dp=2, cp=2)}
"""Layouts of the quick tier for the longer runs."""
BF16_TOLERANCE = 0.02
"""Of a gradient in bf16 against fp32: the norm of the difference, relative; rounding to 8 bits leaves about 0.01."""


@lru_cache
def single(num_layers: int) -> dict[tuple[str, str], dict[str, Any]]:
    """The single process, the model being as deep as on a layout with so many chunks."""
    return run_on_ranks(1, run_points, Layout(), [(case, "all-reduce") for case in CASES], None, num_layers)[0]


def _points(number: int, layout: Layout, cases: list[str]) -> list[tuple[str, str]]:
    """Every case and every way to reduce gradients that the layout has."""
    *others, last = reductions(layout)
    points = [(case, last) for case in cases]
    for offset, way in enumerate(others):
        start = 2 * number + offset
        points += [(case, way) for case in dict.fromkeys(cases[(start + i) % len(cases)] for i in range(2))]
    return points


def _params() -> list[Any]:
    quick = [pytest.param(_points(0, layout, cases), layout, id=f"{layout}-quick") for layout, cases in QUICK.items()]
    everything = {layout: list(CASES) for layout in ALL} | dict.fromkeys(SOURCE_WIRE, WITH_SOURCE)
    for number, (layout, cases) in enumerate(everything.items()):
        if layout.world_size == 4:
            everything[layout] = [cases[(3 * number + i) % len(cases)] for i in range(3)]
    everything |= UNEVEN | ON_EIGHT
    return quick + [
        pytest.param(_points(number, layout, cases), layout, id=str(layout), marks=pytest.mark.slow)
        for number, (layout, cases) in enumerate(everything.items())
    ]


@pytest.mark.parametrize(("points", "layout"), _params())
def test_losses_gradients_and_parameters_are_the_single_processs(points: list[tuple[str, str]], layout: Layout) -> None:
    ranks = run_on_ranks(layout.world_size, run_points, layout, points, timeout_s=900)
    for case, way in points:
        reference = single(max(4, layout.pp * layout.vpp))[case, "all-reduce"]
        found = differences(gathered(ranks, (case, way)), reference)
        assert not found, f"{case}, {way}: {len(found)} differences: {'; '.join(found[:5])}"


def test_the_quick_layouts_have_every_value_of_every_axis() -> None:
    for axis in ("tp", "sp", "pp", "vpp", "dp", "cp", "wire"):
        values = {getattr(layout, axis) for layout in ALL + SOURCE_WIRE}
        assert {getattr(layout, axis) for layout in QUICK} == values, axis
    assert {case for cases in QUICK.values() for case in cases} == CASES.keys()
    points = [point for layout, cases in QUICK.items() for point in _points(0, layout, cases)]
    assert {way for _, way in points} == REDUCTIONS.keys()


def test_every_parameter_has_a_gradient_to_compare_under_every_recompute_mode() -> None:
    for (case, _), result in single(4).items():
        modes = [step[step.index("(") + 1 : -1] for step in result["gradients"]]
        assert set(modes) == RECOMPUTE.keys()
        for (step, gradients), mode in zip(result["gradients"].items(), modes, strict=True):
            assert gradients.keys() == result["parameters"].keys(), f"{case}, {step}"
            for name, gradient in gradients.items():
                # The last matrix of dynamic mixing starts at zero, and hides the one before it for a step.
                is_hidden = "dynamic_mixing.fc1" in name and step.startswith("step 0")
                assert bool(gradient.any()) is not is_hidden, f"{case}, {mode}: {name}"


def test_every_case_is_run_under_every_value_of_every_axis() -> None:
    """Of the layouts that run with some of the cases."""
    runs = [(layout, points) for points, layout in (parameter.values for parameter in _params())]
    for axis in ("tp", "sp", "pp", "vpp", "dp", "cp"):
        for value in {getattr(layout, axis) for layout, _ in runs}:
            having = [points for layout, points in runs if getattr(layout, axis) == value]
            assert {case for points in having for case, _ in points} == CASES.keys(), f"{axis} {value}"
    ways = {(case, way) for _, points in runs for case, way in points}
    assert ways == {(case, way) for case in CASES for way in REDUCTIONS}


def _of_layouts(quick: set[Layout]) -> list[Any]:
    return [
        pytest.param(layout, id=str(layout), marks=[] if layout in quick else pytest.mark.slow) for layout in BY_FOURS
    ]


@lru_cache
def _single_long(num_layers: int) -> list[float]:
    return run_on_ranks(1, run_long, Layout(), num_layers)[0][0]


@pytest.mark.parametrize("layout", _of_layouts(LONG))
def test_the_ordinary_adam_follows_one_curve_and_copies_stay_equal_to_the_bit(layout: Layout) -> None:
    results = run_on_ranks(layout.world_size, run_long, layout, timeout_s=600)
    losses = next(losses for losses, _ in results if losses[0] is not None)
    assert losses == pytest.approx(_single_long(max(4, layout.pp * layout.vpp)), rel=1e-5)
    copies: dict[tuple[str, int | None], list[str]] = {}
    for _, digests in results:
        for key, digest in digests.items():
            copies.setdefault(key, []).append(digest)
    assert any(len(digests) > 1 for digests in copies.values())
    drifted = [key for key, digests in copies.items() if len(set(digests)) > 1]
    assert not drifted, f"copies differ after 20 steps: {drifted}"


@pytest.mark.parametrize("layout", _of_layouts(LONG))
def test_bf16_under_fp32_masters_is_within_its_bound_of_fp32(layout: Layout) -> None:
    cases = WITH_SOURCE if layout.wire == "source" else list(CASES)
    results = run_on_ranks(layout.world_size, run_bf16, layout, cases, timeout_s=600)
    for case in cases:
        fp32 = single(max(4, layout.pp * layout.vpp))[case, "all-reduce"]
        parts = [result[case] for result in results]
        loss = next(loss for loss, _ in parts if loss is not None)
        assert loss == pytest.approx(fp32["losses"]["step 0 (none)"], rel=1e-3), case
        found = difference_of_tensors(
            merge([gradients for _, gradients in parts]),
            fp32["gradients"]["step 0 (none)"],
            BF16_TOLERANCE,
            floor=0.01 * BF16_TOLERANCE,
        )
        assert not found, f"{case}: {found[:5]}"
