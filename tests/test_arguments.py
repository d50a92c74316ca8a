"""The command line: axes over variants, arguments over presets, defaults that fit the machine."""

from __future__ import annotations

import dataclasses
import io
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

import pytest
import torch
from megatron.training.arguments import add_megatron_arguments, parse_args

from megatron_exo import platform, presets
from megatron_exo.arguments import (
    add_exo_arguments,
    default_transformer_impl,
    exo_config_from_args,
    megatron_defaults,
)
from megatron_exo.config import ExoConfig, ExoConfigError
from megatron_exo.startup import understand
from megatron_exo.variants import VARIANTS
from tests.ranks import run_on_ranks

AXES = [field.name for field in dataclasses.fields(ExoConfig)]


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Any:
    def parse(*words: object) -> Namespace:
        monkeypatch.setattr(sys, "argv", ["pretrain", *map(str, words)])
        return parse_args(add_exo_arguments)

    return parse


@pytest.fixture(scope="module")
def destinations() -> set[str]:
    return {action.dest for action in add_megatron_arguments(ArgumentParser(allow_abbrev=False))._actions}


# -- axes -------------------------------------------------------------------------------------------------------


def test_every_axis_has_an_option_and_none_has_a_default_of_its_own(parse: Any) -> None:
    args = parse()
    assert {axis: getattr(args, f"exo_{axis}") for axis in AXES} == dict.fromkeys(AXES)


def test_without_options_the_variant_is_the_papers_best(parse: Any) -> None:
    assert exo_config_from_args(parse()) == VARIANTS["dynamic-e-exoformer"].exo


@pytest.mark.parametrize(
    ("variant", "axis", "value"),
    [
        ("base", "gate", "elementwise"),
        ("e-exoformer", "anchor", "h1"),
        ("e-exoformer-no-norm", "pathways", "vg"),
        ("e-exoformer", "anchor_norm", "qk"),
        ("e-exoformer", "post_norm", "vg"),
        ("e-exoformer", "granularity", "scalar"),
        ("e-exoformer", "mixing", "dynamic"),
        ("e-exoformer", "anchor_weights", "frozen"),
        ("gated", "control", "qk-bias"),
        ("e-exoformer", "drop_anchor", "qk"),
        ("e-exoformer", "drop_current", "v"),
        ("dynamic-e-exoformer", "dynamic_hidden_size", 32),
    ],
)
def test_an_axis_overrides_the_variant_and_changes_nothing_else(
    parse: Any, variant: str, axis: str, value: object
) -> None:
    args = parse("--exo-variant", variant, f"--exo-{axis.replace('_', '-')}", value)
    assert exo_config_from_args(args) == VARIANTS[variant].exo.replace(**{axis: value})


def test_an_axis_can_be_emptied(parse: Any) -> None:
    args = parse("--exo-variant", "e-exoformer", "--exo-anchor-norm", "none")
    assert exo_config_from_args(args) == VARIANTS["e-exoformer-no-norm"].exo


def test_the_overrides_above_cover_every_axis() -> None:
    marks = test_an_axis_overrides_the_variant_and_changes_nothing_else.pytestmark
    assert {case[1] for case in marks[0].args[1]} == set(AXES)


# -- presets ----------------------------------------------------------------------------------------------------


def test_the_command_line_wins_over_the_preset_in_either_order(parse: Any) -> None:
    for words in (["--preset", "demo", "--num-layers", "7"], ["--num-layers", "7", "--preset", "demo"]):
        args = parse(*words)
        assert (args.num_layers, args.hidden_size) == (7, presets.PRESETS["demo"].arguments["hidden_size"])


def test_a_preset_follows_the_variant_on_the_command_line(parse: Any) -> None:
    assert parse("--preset", "450M", "--exo-variant", "base").num_layers == 32
    assert parse("--preset", "450M", "--exo-variant", "gated").num_layers == 29
    assert parse("--preset", "450M", "--exo-variant", "gated", "--exo-gate", "none").num_layers == 32


def test_a_preset_follows_sizes_and_lengths_on_the_command_line(parse: Any) -> None:
    args = parse("--preset", "demo", "--hidden-size=256", "--train-iters", "100", "--lr-wsd-decay-iters", "30")
    assert (args.kv_channels, args.ffn_hidden_size) == (64, 512)
    assert (args.train_iters, args.lr_decay_iters, args.lr_warmup_iters) == (100, 100, 9)
    assert args.lr_wsd_decay_iters == 30  # given, so it stays


def test_a_preset_in_samples_is_what_megatron_takes_for_sample_based_training(parse: Any) -> None:
    args = parse("--preset", "demo", "--train-samples", 800)
    assert (args.train_samples, args.lr_decay_samples, args.lr_warmup_samples) == (800, 800, 72)
    assert (args.train_iters, args.lr_decay_iters, args.lr_warmup_iters) == (None, None, 0)


def test_defaults_and_what_presets_follow_are_arguments_of_megatron_or_ours(parse: Any, destinations: set[str]) -> None:
    assert set(presets.ADJUSTABLE) <= destinations
    assert megatron_defaults().keys() <= destinations
    for preset in presets.PRESETS.values():
        assert preset.arguments.keys() <= vars(parse()).keys()


def test_help_names_variants_and_presets(parse: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--help")
    shown = "".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    assert all(name in shown for name in (*VARIANTS, *presets.PRESETS))


# -- the machine ------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def machine(*, gpu: bool, transformer_engine: bool) -> None:
        monkeypatch.setattr(platform, "is_gpu", lambda: gpu)
        monkeypatch.setattr("megatron.core.extensions.transformer_engine.HAVE_TE", transformer_engine)

    return machine


def test_a_cpu_gets_gloo_the_local_backend_and_no_fused_kernels(machine: Any) -> None:
    machine(gpu=False, transformer_engine=True)
    defaults = megatron_defaults()
    assert (defaults["distributed_backend"], defaults["transformer_impl"]) == ("gloo", "local")
    fusions = [name for name in defaults if "fusion" in name]
    assert len(fusions) == 6
    assert not any(defaults[name] for name in fusions)


def test_a_gpu_gets_nccl_and_transformer_engine_where_it_is_installed(machine: Any) -> None:
    machine(gpu=True, transformer_engine=True)
    defaults = megatron_defaults()
    assert (defaults["distributed_backend"], defaults["transformer_impl"]) == ("nccl", "transformer_engine")
    assert not [name for name in defaults if "fusion" in name or name == "no_persist_layer_norm"]


def test_a_gpu_without_transformer_engine_loses_only_the_kernels_that_it_brings(machine: Any) -> None:
    machine(gpu=True, transformer_engine=False)
    defaults = megatron_defaults()
    assert (defaults["distributed_backend"], default_transformer_impl()) == ("nccl", "local")
    assert {name for name in defaults if "fusion" in name} == {
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "apply_rope_fusion",
    }


def test_the_architecture_is_the_same_on_every_machine(machine: Any) -> None:
    seen = []
    for gpu in (False, True):
        machine(gpu=gpu, transformer_engine=gpu)
        defaults = megatron_defaults()
        seen.append({name: defaults[name] for name in ("normalization", "swiglu", "rotary_base", "add_bias_linear")})
    assert (
        seen[0]
        == seen[1]
        == {
            "normalization": "RMSNorm",
            "swiglu": True,
            "rotary_base": 500_000,
            "add_bias_linear": False,
        }
    )


# -- what checkpoints hold --------------------------------------------------------------------------------------


def _namespace_as_a_checkpoint_holds_it() -> dict[str, Any]:
    words = ["--preset", "demo", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
    sys.argv = ["pretrain", *words, "--exo-variant", "s-exoformer", "--exo-anchor", "h1"]
    start = understand()
    content = io.BytesIO()
    torch.save(start.args, content)
    content.seek(0)
    # Megatron lists the few classes that arguments may hold; anything else does not load.
    loaded = torch.load(content, weights_only=True)
    return {name: value for name, value in vars(loaded).items() if name.startswith("exo_") or name == "vocab_size"}


def test_the_arguments_in_a_checkpoint_are_plain_and_spell_every_axis_out() -> None:
    (saved,) = run_on_ranks(1, _namespace_as_a_checkpoint_holds_it, process_group=False)
    expected = dataclasses.asdict(VARIANTS["s-exoformer"].exo.replace(anchor="h1"))
    assert {axis: saved[f"exo_{axis}"] for axis in AXES} == expected
    assert saved["vocab_size"] == 100
    assert {type(value) for value in saved.values()} <= {str, int, float, bool, type(None)}
    # The name alone would not do, and reading the axes back gives the model again.
    assert saved["exo_variant"] == "s-exoformer"
    assert exo_config_from_args(Namespace(**saved)) == ExoConfig(**expected)


def test_an_unknown_preset_is_refused_while_parsing(parse: Any) -> None:
    with pytest.raises(ExoConfigError, match="unknown preset '450m'; did you mean 450M"):
        parse("--preset", "450m")
