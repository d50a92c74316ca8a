"""The paper's Muon as numbers and as a command line."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.training.arguments import parse_args

from megatron_exo.argument_checks import check_arguments
from megatron_exo.arguments import add_exo_arguments, option
from megatron_exo.errors import UserError
from megatron_exo.optimizer.muon import _state_layouts
from megatron_exo.optimizer.recipe import ARGUMENTS, MEGATRON_DEFAULTS, POLAR_EXPRESS, MuonRecipe, recipe_from_args
from tests.programs import MOCK_DATA, MODEL, RUN

# -- numbers ----------------------------------------------------------------------------------------------------


def _best_quintic(low: float, high: float) -> np.ndarray:
    """(a, b, c) for which a x + b x³ + c x⁵ stays nearest to 1 from ``low`` to ``high``, found by Remez' exchange."""
    inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    for _ in range(100):
        points = np.array([low, *inner, high])
        system = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        a, b, c, _ = np.linalg.solve(system, np.ones(4))
        inner = np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
    return np.array([a, b, c])


def _composition(num_steps: int, low: float, cushion: float, safety: float) -> list[np.ndarray]:
    high, steps = 1.0, []
    for number in range(num_steps):
        step = _best_quintic(max(low, cushion * high), high)
        if low < cushion * high:  # centred on 1 over the whole interval
            step = step * 2 / sum(step @ [x, x**3, x**5] for x in (low, high))
        if number + 1 < num_steps:
            step = step / [1 + safety, (1 + safety) ** 3, (1 + safety) ** 5]
        steps.append(step)
        low = step @ [low, low**3, low**5]
        high = 2 - low
    return steps


def test_the_coefficients_are_polar_express_with_the_authors_margins() -> None:
    derived = _composition(5, low=1e-3, cushion=0.02, safety=0.02)
    derived[0] = derived[0] / [1.02, 1.02**3, 1.02**5]  # the matrix is divided by 1.02 times its norm
    assert np.allclose(POLAR_EXPRESS, derived, rtol=1e-12)


def test_five_steps_bring_singular_values_near_one() -> None:
    values = torch.logspace(-2.9, 0, 1000, dtype=torch.float64)
    for a, b, c in POLAR_EXPRESS:
        values = a * values + b * values**3 + c * values**5
    assert 0.7 < values.min() < values.max() < 1.3


def test_the_momentum_rises_over_the_first_updates_and_falls_over_the_last() -> None:
    recipe = MuonRecipe(num_updates=1000)
    momenta = [recipe.momentum(update, 0.95) for update in (0, 50, 100, 500, 900, 950, 999)]
    assert momenta == pytest.approx([0.85, 0.9, 0.95, 0.95, 0.95, 0.9, 0.851])


def test_the_momentum_of_a_short_run_rises_as_far_as_it_can_fall_again() -> None:
    momenta = [MuonRecipe(num_updates=100).momentum(update, 0.95) for update in (0, 50, 99)]
    assert momenta == pytest.approx([0.85, 0.9, 0.851])


def test_without_stretches_the_momentum_is_constant() -> None:
    recipe = MuonRecipe(momentum_warmup=0, momentum_cooldown=0, num_updates=4)
    assert {recipe.momentum(update, 0.95) for update in range(6)} == {0.95}


# -- the command line -------------------------------------------------------------------------------------------

SIZES = f"{MODEL} {MOCK_DATA} {RUN.replace('--lr 1e-3', '')}"


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MEGATRON_EXO_DEVICE", "cpu")

    def parse(words: str) -> Namespace:
        monkeypatch.setattr(sys, "argv", ["pretrain", *words.split()])
        return parse_args(add_exo_arguments)

    return parse


def test_muon_alone_is_the_papers_recipe(parse: Any) -> None:
    args = parse(f"{SIZES} --optimizer muon")
    check_arguments(args)
    assert (args.lr, args.weight_decay, args.clip_grad) == (0.01, 0.1, 1.0)
    assert {name: getattr(args, name) for name in MEGATRON_DEFAULTS} == MEGATRON_DEFAULTS
    assert (args.muon_momentum, args.muon_nesterov, args.muon_num_ns_steps) == (0.95, True, 5)
    assert recipe_from_args(args) == MuonRecipe("fused", 0.85, 100, 100, 0.95, 0.003, 0.0, num_updates=4)
    assert (args.adam_beta1, args.adam_beta2) == (0.9, 0.95)


def test_the_rates_of_other_optimizers_are_as_before(parse: Any) -> None:
    args = parse(SIZES)
    assert (args.lr, args.weight_decay) == (None, OptimizerConfig.weight_decay)


def test_a_preset_takes_muons_rate_and_keeps_the_last_tenth(parse: Any) -> None:
    args = parse(f"--preset demo {MOCK_DATA} --optimizer muon")
    assert (args.lr, args.min_lr) == pytest.approx((0.01, 0.001))
    assert recipe_from_args(args).adam_min_lr == pytest.approx(0.0003)
    assert parse(f"--preset demo {MOCK_DATA} --optimizer muon --lr 0.02").min_lr == pytest.approx(0.002)


def test_every_number_of_the_recipe_has_an_option(parse: Any) -> None:
    values = ("per-head", 0.5, 7, 8, 0.9, 0.001)
    words = " ".join(f"{option(name)} {value}" for name, value in zip(ARGUMENTS, values, strict=True))
    recipe = recipe_from_args(parse(f"{SIZES} --optimizer muon --lr 0.1 --min-lr 0.01 {words}"))
    assert recipe == MuonRecipe(*values, adam_min_lr=pytest.approx(0.0001), num_updates=4)


def test_a_run_given_in_samples_has_as_many_updates_as_batches(parse: Any) -> None:
    args = parse(f"{SIZES.replace('--train-iters 4', '--train-samples 800')} --optimizer muon")
    assert recipe_from_args(args).num_updates == 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--optimizer adaptive_muon", "not supported; pass --optimizer muon"),
        ("--optimizer dist_muon", "and --use-distributed-optimizer to share its state"),
        ("--exo-muon-split per-head", "--exo-muon-split belongs to --optimizer muon, not to adam; leave"),
        ("--exo-adam-lr 0.1", "--exo-adam-lr belongs to --optimizer muon"),
        ("--optimizer muon --fp16", "no loss scaling for --fp16; use --bf16"),
        ("--optimizer muon --use-distributed-optimizer", "only with --bf16; add that"),
        ("--optimizer muon --decoupled-lr 0.1", "--decoupled-lr does not go with --optimizer muon: --exo-adam-lr is"),
        ("--optimizer muon --apply-wd-to-qk-layernorm", "--apply-wd-to-qk-layernorm does not go with"),
        ("--optimizer muon --muon-scalar-optimizer lion", "lion is not supported; leave it out, AdamW is used"),
        ("--optimizer muon --muon-no-split-qkv --exo-muon-split per-head", "contradicts --exo-muon-split per-head"),
        ("--optimizer muon --muon-num-ns-steps 6", "does not fit the coefficients of the paper's recipe"),
        ("--optimizer muon --no-use-layer-wise-param-layout", "does not go with --optimizer muon here; leave it out"),
        ("--optimizer muon --num-distributed-optimizer-instances 2", "does not go with --optimizer muon; leave it out"),
    ],
)  # fmt: skip
def test_what_muon_cannot_do_is_refused(parse: Any, words: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        check_arguments(parse(f"{SIZES} --lr 0.01 {words}"))


def test_muon_without_its_package_is_refused(parse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_exo.argument_checks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package emerging-optimizers; bash tools/setup_env\.sh muon"):
        check_arguments(parse(f"{SIZES} --optimizer muon"))


# -- layouts ----------------------------------------------------------------------------------------------------


def _projection(rows: int, packed_rows: list[int] | None) -> torch.nn.Module:
    chunk = torch.nn.Module()
    chunk.linear_qkv = torch.nn.Linear(4, rows, bias=False)
    if packed_rows is not None:
        chunk.linear_qkv.weight.packed_rows = packed_rows  # type: ignore[assignment]
    return chunk


@pytest.mark.parametrize(
    ("rows", "packed_rows", "split"),
    [(24, [8, 8], "per-component"), (24, None, "per-component"), (24, [8, 4], "per-head")],
    ids=["groups do not fit", "unknown rows", "half a head"],
)
def test_a_split_that_does_not_fit_the_rows_is_refused(rows: int, packed_rows: list[int] | None, split: str) -> None:
    chunk = _projection(rows, packed_rows)
    with pytest.raises(
        UserError, match=rf"{split} does not fit linear_qkv.weight: 24 rows .* use --exo-muon-split fus"
    ):
        _state_layouts([chunk], split, head_dim=8)
    _state_layouts([chunk], "fused", head_dim=8)


def test_the_layout_of_a_parameter_wins_over_megatrons_guess() -> None:
    chunk = _projection(32, [8, 8])
    chunk.linear_qkv.weight.qkv_split_shapes = [8, 8, 8, 8]  # type: ignore[assignment]
    _state_layouts([chunk], "per-component", head_dim=8)
    assert chunk.linear_qkv.weight.qkv_split_shapes == [8, 8]
