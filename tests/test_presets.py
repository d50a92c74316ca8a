"""Presets: sizes, depths and recipes, held against Megatron's own parser and scheduler."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_exo.accounting import ModelSizes, parameters
from megatron_exo.config import ExoConfigError
from megatron_exo.presets import GPT2_VOCAB_SIZE, PRESETS, get_preset, resolve
from megatron_exo.variants import VARIANTS
from tests.ranks import run_on_ranks

GATED = [name for name, variant in VARIANTS.items() if variant.exo.has_gate]
UNGATED = [name for name in VARIANTS if name not in GATED]


def count(preset: str, variant: str, extra_layers: int = 0) -> int:
    arguments: dict[str, Any] = resolve(preset, VARIANTS[variant].exo)
    sizes = ModelSizes(
        num_layers=arguments["num_layers"] + extra_layers,
        hidden_size=arguments["hidden_size"],
        num_attention_heads=arguments["num_attention_heads"],
        num_query_groups=arguments["num_attention_heads"],
        kv_channels=arguments["kv_channels"],
        ffn_hidden_size=arguments["ffn_hidden_size"],
        vocab_size=GPT2_VOCAB_SIZE,
        seq_length=arguments["seq_length"],
    )
    return sum(parameters(VARIANTS[variant].exo, sizes).values())


@pytest.mark.parametrize("variant", GATED)
def test_gated_models_of_450m_have_29_layers_or_28_with_anchor_matrices(variant: str) -> None:
    expected = 28 if VARIANTS[variant].exo.is_exogenous else 29
    assert resolve("450M", VARIANTS[variant].exo)["num_layers"] == expected


@pytest.mark.parametrize("variant", UNGATED)
def test_ungated_models_of_450m_have_32_layers(variant: str) -> None:
    assert resolve("450M", VARIANTS[variant].exo)["num_layers"] == 32


@pytest.mark.parametrize("variant", GATED)
def test_gated_models_of_1b_have_the_published_32_layers(variant: str) -> None:
    assert resolve("1B", VARIANTS[variant].exo)["num_layers"] == 32


@pytest.mark.parametrize(("preset", "reference"), [("450M", "base"), ("1B", "dynamic-e-exoformer")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_depth_is_the_deepest_that_keeps_to_the_references_parameters(
    preset: str, reference: str, variant: str
) -> None:
    budget = count(preset, reference) * 1.001
    assert count(preset, variant) <= budget < count(preset, variant, extra_layers=1)


@pytest.mark.parametrize("preset", ["450M", "1B"])
def test_every_variant_of_a_family_differs_in_depth_alone(preset: str) -> None:
    base = resolve(preset, VARIANTS["base"].exo)
    for variant in VARIANTS.values():
        assert resolve(preset, variant.exo) | {"num_layers": 0} == base | {"num_layers": 0}


def test_450m_is_the_papers_recipe() -> None:
    arguments: dict[str, Any] = resolve("450M", VARIANTS["base"].exo)
    assert arguments["global_batch_size"] * arguments["seq_length"] == 262_144
    assert arguments["train_iters"] == 38_147
    assert arguments["hidden_size"] == arguments["num_attention_heads"] * arguments["kv_channels"]
    assert arguments["ffn_hidden_size"] == 2 * arguments["hidden_size"]


def test_resolving_does_not_change_the_preset() -> None:
    resolve("450M", VARIANTS["gated"].exo)["lr"] = 1.0
    assert get_preset("450M").arguments["num_layers"] == 32
    assert get_preset("450M").arguments["lr"] == 0.003


@pytest.mark.parametrize(
    ("wrong", "hint"), [("1b", "1B"), ("450", "450M"), ("dmo", "demo"), ("tiny", "demo, 450M, 1B")]
)
def test_an_unknown_preset_is_answered_with_the_nearest_names(wrong: str, hint: str) -> None:
    with pytest.raises(ExoConfigError, match=f"unknown preset '{wrong}'.*{hint}"):
        resolve(wrong, VARIANTS["base"].exo)


def parse_and_schedule(presets: dict[str, dict[str, Any]]) -> dict[str, tuple[dict[str, Any], list[float]]]:
    """On one rank: the values as Megatron's parser reads them, and its rate after every iteration."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    options = {action.dest: action.option_strings[0] for action in parser._actions}
    results = {}
    for preset, arguments in presets.items():
        words = [word for name, value in arguments.items() for word in (options[name], str(value))]
        args = parser.parse_args(words)
        scheduler = OptimizerParamScheduler(
            SimpleNamespace(param_groups=[]),
            init_lr=0.0,
            max_lr=args.lr,
            min_lr=args.min_lr,
            lr_warmup_steps=args.lr_warmup_iters,
            lr_decay_steps=args.lr_decay_iters,
            lr_decay_style=args.lr_decay_style,
            start_wd=0.0,
            end_wd=0.0,
            wd_incr_steps=args.train_iters,
            wd_incr_style="constant",
            wsd_decay_steps=args.lr_wsd_decay_iters,
            lr_wsd_decay_style=args.lr_wsd_decay_style,
        )
        rates = []
        for scheduler.num_steps in range(args.train_iters + 1):
            rates.append(scheduler.get_lr({}) / args.lr)
        results[preset] = ({name: getattr(args, name) for name in arguments}, rates)
    return results


@pytest.fixture(scope="module")
def in_megatron() -> dict[str, tuple[dict[str, Any], list[float]]]:
    (results,) = run_on_ranks(1, parse_and_schedule, {name: dict(preset.arguments) for name, preset in PRESETS.items()})
    return results


@pytest.mark.parametrize("preset", PRESETS)
def test_megatrons_parser_reads_every_value_as_it_is(
    preset: str, in_megatron: dict[str, tuple[dict[str, Any], list[float]]]
) -> None:
    parsed, _ = in_megatron[preset]
    assert parsed == PRESETS[preset].arguments


@pytest.mark.parametrize("preset", PRESETS)
def test_the_rate_is_flat_until_the_last_20_percent_and_ends_at_a_tenth(
    preset: str, in_megatron: dict[str, tuple[dict[str, Any], list[float]]]
) -> None:
    arguments, rates = in_megatron[preset]
    iters, warmup = arguments["train_iters"], arguments["lr_warmup_iters"]
    assert rates[warmup // 2] == pytest.approx(0.5)
    assert set(rates[warmup : int(0.8 * iters)]) == {1.0}
    assert rates[int(0.9 * iters)] == pytest.approx(0.55, abs=1e-4)  # halfway, up to the rounding of iterations
    assert rates[iters] == pytest.approx(0.1)
