"""Presets: sizes, depths and recipes, held against Megatron's own parser and scheduler."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_exo import presets
from megatron_exo.accounting import parameters
from megatron_exo.config import ExoConfigError
from megatron_exo.presets import GPT2_VOCAB_SIZE, PRESETS, get_preset, matching_of, resolve
from megatron_exo.presets.matching import total_flops, total_parameters
from megatron_exo.sizes import ModelSizes
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


@pytest.mark.parametrize(
    ("preset", "reference"), [(name, PRESETS[name].reference) for name in PRESETS if name != "demo"]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_depth_is_the_deepest_that_keeps_to_the_references_parameters(
    preset: str, reference: str, variant: str
) -> None:
    budget = count(preset, reference) * 1.001
    assert count(preset, variant) <= budget < count(preset, variant, extra_layers=1)


@pytest.mark.parametrize("preset", PRESETS)
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
    assert arguments["exo_documents"] == "masked"


def test_presets_come_from_the_smallest_to_the_largest() -> None:
    assert list(PRESETS) == ["demo", "20M", "60M", "190M", "450M", "1B", "3B", "7B"]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "demo"])
def test_a_preset_is_named_after_its_parameters_and_trains_on_about_twenty_tokens_for_each(preset: str) -> None:
    named = float(preset[:-1]) * {"M": 1e6, "B": 1e9}[preset[-1]]
    parameters = count(preset, PRESETS[preset].reference)
    assert parameters == pytest.approx(named, rel=0.08)
    assert 18 < PRESETS[preset].tokens / parameters < 23
    arguments = PRESETS[preset].arguments
    assert arguments["hidden_size"] == arguments["num_attention_heads"] * arguments["kv_channels"]
    assert arguments["ffn_hidden_size"] == 2 * arguments["hidden_size"]


def test_the_demo_has_four_layers_whatever_the_variant() -> None:
    assert {resolve("demo", variant.exo)["num_layers"] for variant in VARIANTS.values()} == {4}


def test_a_preset_is_a_file_of_twenty_lines_or_so() -> None:
    files = {path.stem: path for path in Path(presets.__file__).parent.glob("*.toml")}
    assert files.keys() == {*PRESETS, "recipe"}
    assert all(len(file.read_text().splitlines()) < 25 for file in files.values())


# -- matching ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_matched_by_ffn_width_a_variant_is_as_deep_and_as_large_as_the_reference(preset: str, variant: str) -> None:
    matching = matching_of(preset, match="depth")
    exo = VARIANTS[variant].exo
    sizes = matching.solve(exo)
    assert dataclasses.replace(sizes, ffn_hidden_size=matching.sizes.ffn_hidden_size) == matching.sizes
    assert (sizes.ffn_hidden_size - matching.sizes.ffn_hidden_size) % 16 == 0
    step = 16 * 3 * sizes.hidden_size * sizes.num_layers
    assert abs(total_parameters(exo, sizes) - total_parameters(matching.exo, matching.sizes)) <= step / 2
    assert max(map(abs, matching.differences(exo, sizes))) < 0.003


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_matched_in_flops_a_variant_is_the_deepest_that_costs_no_more(preset: str, variant: str) -> None:
    matching = matching_of(preset, match="flops")
    exo = VARIANTS[variant].exo
    sizes = matching.solve(exo)
    budget = 1.001 * total_flops(matching.exo, matching.sizes)
    deeper = dataclasses.replace(sizes, num_layers=sizes.num_layers + 1)
    assert total_flops(exo, sizes) <= budget < total_flops(exo, deeper)


def test_a_dynamic_nuresformer_gets_the_capacity_of_the_anchor_matrices_by_one_option() -> None:
    """At 1B: 4 d² parameters over 32 layers of three FFN matrices are 64 channels."""
    arguments = resolve("1B", VARIANTS["dynamic-e-nuresformer"].exo, match="depth")
    assert (arguments["num_layers"], arguments["ffn_hidden_size"]) == (32, 3072 + 4 * 1536**2 // (32 * 3 * 1536))
    matching = matching_of("1B", match="depth")
    assert matching.variant == "dynamic-e-exoformer"
    sizes = matching.solve(VARIANTS["dynamic-e-nuresformer"].exo)
    # What is left: λ and the dynamic MLP of layer 1, and the gains of two anchor norms.
    left = 8 * 1536 + (1536 * 16 + 16 * 8 + 8) + 2 * 96
    assert total_parameters(VARIANTS["dynamic-e-nuresformer"].exo, sizes) == count("1B", matching.variant) - left


def test_any_variant_can_be_the_reference_at_the_depth_that_the_preset_gives_it() -> None:
    matching = matching_of("450M", match="depth", match_to="dynamic-e-exoformer")
    assert matching.sizes.num_layers == 28
    arguments = resolve("450M", VARIANTS["dynamic-e-nuresformer"].exo, match="depth", match_to="dynamic-e-exoformer")
    # 4 d² over 28 layers of three FFN matrices are 48.8 channels: three steps of 16.
    assert (arguments["num_layers"], arguments["ffn_hidden_size"]) == (28, 2048 + 48)
    by_params = resolve("450M", VARIANTS["gated"].exo, match_to="dynamic-e-exoformer")
    assert by_params["num_layers"] == 28


def test_unmatched_variants_have_the_presets_sizes() -> None:
    for variant in ("base", "gated", "dynamic-e-exoformer"):
        arguments = resolve("450M", VARIANTS[variant].exo, match="none")
        assert (arguments["num_layers"], arguments["ffn_hidden_size"]) == (32, 2048)


def test_a_given_depth_is_everyones_where_the_ffn_width_is_solved() -> None:
    matching = matching_of("1B", {"num_layers": 4}, match="depth")
    assert matching.sizes.num_layers == 4
    assert resolve("1B", VARIANTS["base"].exo, {"num_layers": 4}, match="depth")["ffn_hidden_size"] > 3072 + 512


def test_a_given_depth_is_not_matched_unless_that_is_asked_for() -> None:
    assert resolve("450M", VARIANTS["gated"].exo, {"num_layers": 4})["num_layers"] == 4
    assert matching_of("450M", {"num_layers": 4}).rule == "none"


@pytest.mark.parametrize(
    ("overrides", "match", "message"),
    [
        ({"num_layers": 4}, {"match": "params"}, "--match params finds --num-layers, which is given, too; leave one"),
        ({"num_layers": 4}, {"match": "flops"}, "or use --match depth, which finds the FFN width"),
        ({"num_layers": 4}, {"match_to": "gated"}, "--match params finds --num-layers"),
        ({"ffn_hidden_size": 64}, {"match": "depth"}, "--match depth finds --ffn-hidden-size, which is given"),
        ({}, {"match": "none", "match_to": "gated"}, "--match-to without a rule; pass --match params"),
        ({}, {"match_to": "gatd"}, "unknown variant 'gatd'; did you mean gated"),
        ({"num_layers": 1, "hidden_size": 16}, {"match": "depth", "match_to": "base"}, "without a single FFN"),
    ],
)
def test_what_cannot_be_matched_is_refused(overrides: dict[str, Any], match: dict[str, str], message: str) -> None:
    with pytest.raises(ExoConfigError, match=message):
        resolve("450M", VARIANTS["dynamic-e-exoformer"].exo, overrides, **match)


def test_resolving_does_not_change_the_preset() -> None:
    resolve("450M", VARIANTS["gated"].exo)["lr"] = 1.0
    assert get_preset("450M").arguments["num_layers"] == 32
    assert get_preset("450M").arguments["lr"] == 0.003


@pytest.mark.parametrize(
    ("wrong", "hint"), [("1b", "1B"), ("450", "450M"), ("dmo", "demo"), ("tiny", "demo, 20M, .*7B")]
)
def test_an_unknown_preset_is_answered_with_the_nearest_names(wrong: str, hint: str) -> None:
    with pytest.raises(ExoConfigError, match=f"unknown preset '{wrong}'.*{hint}"):
        resolve(wrong, VARIANTS["base"].exo)


# -- what follows from an override ------------------------------------------------------------------------------


def changed(preset: str, **overrides: object) -> dict[str, Any]:
    """What ``resolve`` gives otherwise because of ``overrides``, the overrides themselves left out."""
    exo = VARIANTS["base"].exo
    plain, adjusted = resolve(preset, exo), resolve(preset, exo, overrides)
    return {key: value for key, value in adjusted.items() if key not in overrides and value != plain.get(key)}


def test_a_shorter_run_keeps_the_shape_of_the_schedule() -> None:
    assert changed("450M", train_iters=1000) == {
        "lr_warmup_init": pytest.approx(3e-3 / 26),
        "lr_warmup_iters": 25,  # 26 steps are the same 2.6% of the run
        "lr_decay_iters": 1000,
        "lr_wsd_decay_iters": 200,
        "eval_interval": 250,
    }


def test_a_length_in_tokens_ends_with_the_step_that_reaches_it() -> None:
    step = 262_144
    for tokens, steps in (
        (1, 1),
        (step, 1),
        (step + 1, 2),
        (10 * step, 10),
        (10 * step + 1, 11),
        (50 * 10**9, 190_735),
    ):
        assert resolve("450M", VARIANTS["base"].exo, {"train_tokens": tokens})["train_iters"] == steps
    assert changed("450M", train_tokens=1000 * step) == {"train_iters": 1000} | changed("450M", train_iters=1000)


def test_another_batch_or_context_keeps_the_tokens() -> None:
    assert changed("450M", global_batch_size=256)["train_iters"] == 19_074
    assert changed("450M", seq_length=4096)["train_iters"] == 19_074
    assert "train_iters" not in changed("450M", global_batch_size=256, train_iters=38_147)


def test_a_longer_run_keeps_the_warm_up_and_the_intervals() -> None:
    assert changed("450M", train_iters=190_735) == {"lr_decay_iters": 190_735, "lr_wsd_decay_iters": 38_147}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("train_iters", [1, 2, 3, 7, 40])
def test_a_run_of_any_length_has_a_schedule_that_fits_in_it(preset: str, train_iters: int) -> None:
    arguments = resolve(preset, VARIANTS["base"].exo, {"train_iters": train_iters})
    assert arguments["lr_warmup_iters"] < arguments["lr_decay_iters"] == train_iters
    assert 1 <= arguments["lr_wsd_decay_iters"] <= train_iters
    for interval in ("eval_interval", "save_interval", "log_interval"):
        assert 1 <= arguments[interval] <= train_iters


def test_a_length_in_samples_makes_the_schedule_one_in_samples() -> None:
    batch = 128
    assert changed("450M", train_samples=1000 * batch) == {
        "train_iters": None,
        "lr_decay_iters": None,
        "lr_wsd_decay_iters": None,
        "lr_warmup_iters": 0,
        "lr_decay_samples": 1000 * batch,
        "lr_wsd_decay_samples": 200 * batch,
        "lr_warmup_init": pytest.approx(3e-3 / 26),
        "lr_warmup_samples": 25 * batch,
        "eval_interval": 250,
    }
    assert changed("450M", train_samples=1000 * 64, global_batch_size=64)["lr_warmup_samples"] == 25 * 64


def test_a_growing_batch_makes_the_schedule_one_in_samples_of_as_many_tokens() -> None:
    growing = changed("450M", step_batch_size_schedule="0:32 1B:128")
    assert growing["train_samples"] == growing["lr_decay_samples"] == 4_882_813  # 10B tokens of 2,048 a sample
    assert (growing["global_batch_size"], growing["train_iters"]) == (None, None)
    assert growing["lr_warmup_samples"] == 999 * 128


def test_another_rate_still_ends_at_its_tenth() -> None:
    assert changed("450M", lr=1e-3) == {"min_lr": pytest.approx(1e-4), "lr_warmup_init": pytest.approx(1e-6)}


def test_a_warm_up_given_as_a_fraction_replaces_the_one_in_iterations() -> None:
    assert changed("450M", lr_warmup_fraction=0.01) == {"lr_warmup_iters": 0, "lr_warmup_init": 0.0}


def test_another_width_keeps_the_proportions_of_heads_and_ffn() -> None:
    assert changed("demo", hidden_size=256) == {"kv_channels": 64, "ffn_hidden_size": 512}
    assert changed("demo", hidden_size=256, num_attention_heads=8) == {"ffn_hidden_size": 512}
    assert changed("demo", num_attention_heads=8) == {"kv_channels": 16}


def test_what_is_given_does_not_follow() -> None:
    assert changed("demo", hidden_size=256, kv_channels=48, ffn_hidden_size=700) == {}
    assert changed("demo", hidden_size=250, kv_channels=48) == {"ffn_hidden_size": 500}


def test_a_width_that_does_not_divide_into_heads_is_refused() -> None:
    with pytest.raises(ExoConfigError, match="hidden size 250 cannot be divided into 4 heads; give another"):
        changed("demo", hidden_size=250)


def test_a_longer_context_brings_its_positions() -> None:
    assert changed("demo", seq_length=512, train_iters=400) == {"max_position_embeddings": 512}


def test_depths_are_matched_at_the_widths_of_the_run() -> None:
    """A gated model of another width or with fewer query groups has no more parameters than the ungated one."""
    gated = VARIANTS["e-exoformer"].exo
    for overrides in ({"hidden_size": 512}, {"num_query_groups": 4}, {"ffn_hidden_size": 4096}):
        arguments = resolve("450M", gated, overrides)
        sizes = {"vocab_size": GPT2_VOCAB_SIZE, "num_query_groups": overrides.get("num_query_groups", 16)}
        sizes |= {
            key: arguments[key] for key in ("hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size")
        }
        reference = ModelSizes(num_layers=32, seq_length=2048, **sizes)
        budget = sum(parameters(VARIANTS["base"].exo, reference).values()) * 1.001
        ours, deeper = (
            sum(parameters(gated, dataclasses.replace(reference, num_layers=arguments["num_layers"] + extra)).values())
            for extra in (0, 1)
        )
        assert ours <= budget < deeper


# -- held against Megatron --------------------------------------------------------------------------------------


def parse_and_schedule(presets: dict[str, dict[str, Any]]) -> dict[str, tuple[dict[str, Any], list[float]]]:
    """On one rank: the values as the parser reads them, Megatron's and ours, and the rate of every step."""
    from megatron.training.arguments import add_megatron_arguments

    from megatron_exo.arguments import add_exo_arguments
    from megatron_exo.schedule import learning_rate

    sys.argv = ["pretrain"]
    parser = add_exo_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    options = {action.dest: action.option_strings[0] for action in parser._actions}
    results = {}
    for preset, arguments in presets.items():
        words = [word for name, value in arguments.items() for word in (options[name], str(value))]
        args = parser.parse_args(words)
        rate, batch = learning_rate(args), args.global_batch_size
        rates = [rate(step * batch) / args.lr for step in range(args.train_iters)]
        results[preset] = ({name: getattr(args, name) for name in arguments}, rates)
    return results


@pytest.fixture(scope="module")
def in_megatron() -> dict[str, tuple[dict[str, Any], list[float]]]:
    (results,) = run_on_ranks(1, parse_and_schedule, {name: dict(preset.arguments) for name, preset in PRESETS.items()})
    return results


@pytest.mark.parametrize("preset", PRESETS)
def test_the_parser_reads_every_value_as_it_is(
    preset: str, in_megatron: dict[str, tuple[dict[str, Any], list[float]]]
) -> None:
    parsed, _ = in_megatron[preset]
    assert parsed == PRESETS[preset].arguments


@pytest.mark.parametrize("preset", PRESETS)
def test_the_rate_warms_up_from_the_first_step_is_flat_and_decays_over_the_last_fifth(
    preset: str, in_megatron: dict[str, tuple[dict[str, Any], list[float]]]
) -> None:
    """The author's rule for every step."""
    arguments, rates = in_megatron[preset]
    iters, warmup = arguments["train_iters"], arguments["lr_warmup_iters"] + 1
    decay = round(iters / 5)
    expected = [min((step + 1) / warmup, 1.0, 0.1 + 0.9 * (iters - step) / decay) for step in range(iters)]
    assert rates == pytest.approx(expected)


def test_parameter_groups_with_a_rate_of_their_own_follow_the_same_schedule() -> None:
    from megatron_exo.schedule import Scheduler

    groups: list[dict[str, Any]] = [{}, {"max_lr": 0.003, "min_lr": 0.0003}]
    scheduler = Scheduler(
        SimpleNamespace(param_groups=groups),
        init_lr=0.01 / 5,
        max_lr=0.01,
        min_lr=0.001,
        lr_warmup_steps=4,
        lr_decay_steps=20,
        lr_decay_style="WSD",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=20,
        wd_incr_style="constant",
        wsd_decay_steps=10,
        lr_wsd_decay_style="linear",
    )
    for step in range(20):
        share = min((step + 1) / 5, 1.0, 0.1 + 0.9 * (20 - step) / 10)
        assert [group["lr"] for group in groups] == pytest.approx([0.01 * share, 0.003 * share])
        scheduler.step(1)
