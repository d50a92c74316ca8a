"""ExoFormer's command-line arguments, beside Megatron's own.

A run names a variant and a size (``--exo-variant``, ``--preset``) and overrides single axes or sizes as it likes.
Everything an ExoFormer needs of Megatron (RMSNorm, RoPE, SwiGLU, no biases, ...) is a default here.
"""

from __future__ import annotations

import difflib
import re
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import partial
from importlib.util import find_spec
from typing import Any, NoReturn

from megatron_exo import platform, presets, run_file
from megatron_exo.config import (
    ANCHOR_WEIGHTS,
    ANCHORS,
    CONTROLS,
    GATES,
    GRANULARITIES,
    MIXINGS,
    ExoConfig,
    ExoConfigError,
)
from megatron_exo.errors import leave
from megatron_exo.model.config import WIRES
from megatron_exo.model.documents import DOCUMENTS
from megatron_exo.model.initialization import RECIPES
from megatron_exo.optimizer import recipe as muon
from megatron_exo.presets.matching import RULES
from megatron_exo.same_run import KINDS
from megatron_exo.variants import VARIANTS, get_variant

_AXES: dict[str, tuple[Sequence[str] | type, str]] = {
    "gate": (GATES, "multiply the attention output by an elementwise sigmoid gate, or not"),
    "anchor": (ANCHORS, "source of the anchor: layer 1's own projections, or matrices applied to H_0, H_1, H_2"),
    "pathways": (str, "pathways that are mixed: a subset of 'qkvg', or 'none'"),
    "anchor_norm": (str, "pathways whose anchor is normalised: a subset of 'qkvg', or 'none'"),
    "post_norm": (str, "pathways normalised again after mixing: a subset of 'vg', or 'none'"),
    "granularity": (GRANULARITIES, "shape of the mixing coefficients of a layer"),
    "mixing": (MIXINGS, "static coefficients, or coefficients times a sigmoid scalar per token"),
    "anchor_weights": (ANCHOR_WEIGHTS, "learn the anchor's matrices, or keep them random"),
    "control": (CONTROLS, "a control in place of the anchor"),
    "drop_anchor": (str, "inference only: pathways whose anchor term is removed"),
    "drop_current": (str, "inference only: pathways whose current term is removed"),
    "dynamic_hidden_size": (int, "hidden width of the dynamic-mixing MLP"),
}
"""Axis of ExoConfig → (choices or type, help)."""


def option(name: str) -> str:
    """How the command line spells an argument."""
    return "--" + name.replace("_", "-")


def add_exo_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--exo-*`` and ``--preset``, and set Megatron's defaults to what this model and machine need.

    The preset and the variant are looked up while the parser is built, so that anything else on the command line
    overrides what they bring.
    """
    group = parser.add_argument_group("ExoFormer", "the variant, axis by axis; see docs/variants.md")
    group.add_argument(
        "--exo-variant",
        default="dynamic-e-exoformer",
        metavar="NAME",
        help=f"a variant by its paper name (default: %(default)s); one of: {', '.join(VARIANTS)}",
    )
    for axis, (kind, text) in _AXES.items():
        values: dict[str, Any] = {"type": kind} if isinstance(kind, type) else {"choices": kind}
        group.add_argument(option(f"exo_{axis}"), default=None, help=f"{text}; overrides the variant", **values)
    group.add_argument(
        "--exo-init",
        choices=RECIPES,
        default="paper",
        help="initial weights, the same for every layout of ranks: the paper's (residual projections, head and the "
        "last matrix of dynamic mixing at zero), the author's code's (that matrix drawn), or Megatron's "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--tie-embeddings-and-output-weights",
        dest="untie_embeddings_and_output_weights",
        action="store_false",
        help="one matrix for both, instead of two as in the paper",
    )
    group.add_argument(
        "--exo-wire",
        choices=WIRES,
        default="anchors",
        help="what pipeline stages send beside the hidden states: the anchors, or the hidden states that they are made "
        "of, with a copy of the anchor's matrices on each stage; see docs/parallelism.md (default: %(default)s)",
    )
    group.add_argument(
        "--exo-documents",
        choices=DOCUMENTS,
        default="joined",
        help="what the documents of one row are to each other, which begin at the tokenizer's end of text: one text; "
        "masked from each other, with positions that run on over the row; or masked, with positions that start from 0 "
        "in each (default: %(default)s, masked with --preset)",
    )
    group.add_argument(
        "--exo-z-loss-weight",
        type=float,
        default=1e-5,
        help="weight of the mean squared log-partition in the loss (default: %(default)s)",
    )
    group.add_argument(
        "--exo-start-timeout",
        type=float,
        default=run_file.START_TIMEOUT_S,
        metavar="SECONDS",
        help="how long ranks wait for each other at the start before they say who is missing (default: %(default)s)",
    )
    group.add_argument(
        "--exo-lost-host-timeout",
        type=float,
        default=45.0,
        metavar="SECONDS",
        help="end the job when another host has given no sign of life for so long; 0: wait for it until a collective "
        "times out (default: %(default)s)",
    )
    group.add_argument(
        "--exo-log-samples",
        action="store_true",
        help="write which samples of the training set each step takes, to SAVE/logs/samples-dpN.jsonl",
    )
    group.add_argument(
        "--exo-accept-change",
        nargs="+",
        choices=KINDS,
        metavar="WHAT",
        help="go on from a checkpoint although this is not what it was trained on; without this, a change of "
        f"{', '.join(KINDS[:-1])} or {KINDS[-1]} is refused",
    )
    group.add_argument(
        "--replay",
        metavar="FILE",
        default=None,
        help="train one iteration from --load on the batch that ended a run (SAVE/not-finite), and name the module "
        "whose output is the first that is not finite; saves nothing",
    )
    group.add_argument(
        "--exo-log",
        choices=("short", "full"),
        default="short",
        help="what the terminal shows: a plan and one line per log interval, or everything Megatron prints "
        "(which always goes to SAVE/logs)",
    )
    group.add_argument(
        "--keep-last",
        type=int,
        metavar="N",
        help="keep the N newest checkpoints (1 if only --keep-every is given) and remove older ones once a newer one "
        "is whole (default: keep all)",
    )
    group.add_argument(
        "--keep-every",
        type=int,
        metavar="M",
        help="keep checkpoints whose iteration is a multiple of M, too, and remove other old ones",
    )
    group.add_argument(
        "--exo-tolerate-failed-saves",
        action="store_true",
        help="go on training when a checkpoint cannot be written, as on a full disk: those before it stay, the next "
        "save tries again, and the exit status is 1 if the last one failed (default: end at once)",
    )
    group.add_argument(
        "--no-exit-signal-handler",
        dest="exit_signal_handler",
        action="store_false",
        help="die of SIGTERM at once; otherwise SIGTERM and SIGUSR1 end the run after the iteration in progress, with "
        "a checkpoint and exit status 0",
    )
    group.add_argument(
        "--grad-norm-skip-threshold",
        type=float,
        default=float("inf"),
        metavar="NORM",
        help="leave out the update of an iteration whose gradient norm, before clipping, is above this "
        "(default: no limit)",
    )
    group.add_argument(
        "--no-verify-checkpoint",
        dest="verify_checkpoint",
        action="store_false",
        help="load a checkpoint without comparing its files with their checksums, which reads it twice: each machine "
        "its share, before the ranks meet (see --exo-start-timeout)",
    )
    group.add_argument(
        "--preset",
        metavar="NAME",
        default=None,
        help=f"sizes of model and run ({', '.join(presets.PRESETS)}), which any other argument overrides; see "
        "docs/sizes.md",
    )
    group.add_argument(
        "--match",
        choices=RULES,
        default=None,
        help="how the sizes of a preset make variants comparable: the depth that equals the reference's parameters or "
        "FLOPs per token, the reference's depth with the FFN width that equals its parameters, or nothing "
        "(default: the preset's, mostly params)",
    )
    group.add_argument(
        "--match-to", metavar="VARIANT", default=None, help="the reference of --match (default: the preset's)"
    )
    group.add_argument(
        "--train-tokens",
        type=token_count,
        metavar="N",
        default=None,
        help="length of the run, for example 50e9; the last step is the one that reaches it",
    )
    group.add_argument(
        run_file.OPTION,
        metavar="FILE",
        default=None,
        help="a run as a TOML file whose keys are options of this command line and of torchrun's; options given "
        "beside it win (an example: examples/falsification_1b.toml)",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan of the run and what is missing for it here; build, read and start nothing",
    )

    _add_muon_arguments(parser, group)
    parser.error = partial(_one_line_error, parser)  # type: ignore[method-assign]
    parser.set_defaults(**megatron_defaults())
    if {"-h", "--help"} & set(sys.argv):
        _repair_help(parser)
    words = _with_run_file(parser)
    chosen, sizes = _early_arguments(parser, group, words)
    if "yaml_cfg" in sizes:
        raise ExoConfigError("--yaml-cfg replaces the command line and with it ExoFormer's arguments; pass arguments")
    if sizes.pop("optimizer", None) == "muon":
        parser.set_defaults(**muon.RATES)
        sizes.setdefault("lr", muon.RATES["lr"])
    parser.set_defaults(**_defaults_of_preset(chosen, sizes))
    return parser


def _with_run_file(parser: ArgumentParser) -> list[str]:
    """The words of the command line behind those of the run file it names, which the parser reads, too, from now on."""
    given = sys.argv[1:]
    path = run_file.named_by(given)
    if path is None:
        return given
    words = run_file.training_words(path, parser._actions, given)
    parse_known_args = parser.parse_known_args

    def with_file(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        return parse_known_args([*words, *(sys.argv[1:] if args is None else args)], namespace)

    parser.parse_known_args = with_file  # type: ignore[method-assign, assignment]
    return [*words, *given]


def _defaults_of_preset(chosen: Namespace, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--preset``, ``--match`` and ``--train-tokens`` bring: arguments, and the sizes of the reference."""
    lengths = [name for name in ("train_iters", "train_samples") if name in sizes]
    if chosen.train_tokens is not None:
        if lengths:
            raise ExoConfigError(
                f"--train-tokens and {option(lengths[0])} both give the length of the run; leave one out"
            )
        sizes = {**sizes, "train_tokens": chosen.train_tokens}
    if chosen.preset is not None:
        match = {"match": chosen.match, "match_to": chosen.match_to}
        defaults = presets.resolve(chosen.preset, exo_config_from_args(chosen), sizes, **match)
        matching = presets.matching_of(chosen.preset, sizes, **match)
        if matching.rule != "none":
            reference = matching.sizes
            defaults |= {"match": matching.rule, "match_to": matching.variant}
            defaults |= {"match_num_layers": reference.num_layers, "match_ffn_hidden_size": reference.ffn_hidden_size}
        return defaults
    for name in ("match", "match_to"):
        if getattr(chosen, name) is not None:
            raise ExoConfigError(f"{option(name)} is about the sizes of a preset; pass --preset, or leave it out")
    if chosen.train_tokens is None:
        return {}
    if {"step_batch_size_schedule", "seq_length"} <= sizes.keys():
        return {"train_samples": presets.steps_for(chosen.train_tokens, 1, sizes["seq_length"])}
    if not {"global_batch_size", "seq_length"} <= sizes.keys():
        raise ExoConfigError("--train-tokens needs --global-batch-size and --seq-length, or --preset; pass them")
    return {"train_iters": presets.steps_for(chosen.train_tokens, sizes["global_batch_size"], sizes["seq_length"])}


def token_count(text: str) -> int:
    """A whole number above 0 that may be written with an exponent: ``50e9``."""
    number = Decimal(text) if re.fullmatch(r"[\d_.]+([eE]\+?\d{1,2})?", text) else Decimal(0)
    if number < 1 or number != int(number):
        raise ArgumentTypeError(f"{text!r} is no number of tokens; write for example 50e9")
    return int(number)


def _add_muon_arguments(parser: ArgumentParser, group: Any) -> None:
    """What ``--optimizer muon`` takes beside Megatron's ``--muon-…``; see docs/optimizers.md."""
    defaults = muon.MuonRecipe()
    for name, kind, text in (
        ("exo_muon_split", muon.SPLITS, "what of a packed projection is one matrix: all of it, as in the paper, the "
         f"rows of each component, or those of each head (default: {defaults.split})"),
        ("exo_muon_momentum_start", float, f"momentum of the first and last update (default: "
         f"{defaults.momentum_start}); --muon-momentum is that in between"),
        ("exo_muon_momentum_warmup", int, f"updates in which it rises (default: {defaults.momentum_warmup})"),
        ("exo_muon_momentum_cooldown", int, "last updates, in which it falls (default: "
         f"{defaults.momentum_cooldown})"),
        ("exo_muon_beta2", float, f"decay of the row or column second moment (default: {defaults.beta2})"),
        ("exo_adam_lr", float, "highest learning rate of what Muon leaves to AdamW: embedding, head, norms, biases and "
         f"coefficients; it follows the schedule of --lr, which is Muon's (default: {defaults.adam_lr})"),
    ):  # fmt: skip
        values: dict[str, Any] = {"type": kind} if isinstance(kind, type) else {"choices": kind}
        group.add_argument(option(name), default=None, help=f"with --optimizer muon: {text}", **values)
    for action in parser._actions:
        if action.dest == "muon_fp32_matmul_prec":
            action.choices = ("medium", "high", "highest")  # torch's names; Megatron's "low" is none of them


def _repair_help(parser: ArgumentParser) -> None:
    """Escape the percent signs that Megatron forgot to: a single one makes ``--help`` fail."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except ValueError:
            action.help = (action.help or "").replace("%", "%%")


def _one_line_error(parser: ArgumentParser, message: str) -> NoReturn:
    """Without argparse's usage of 700 options; for an unknown option, with the nearest known ones."""
    if message.startswith("unrecognized arguments: "):
        unknown = message.removeprefix("unrecognized arguments: ").split()[0].split("=")[0]
        known = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown, known, n=2)
        message = f"unknown argument {unknown}; "
        message += f"did you mean {' or '.join(near)}?" if near else "--help lists them all"
    leave(message, status=2)


def _early_arguments(parser: ArgumentParser, group: Any, words: Sequence[str]) -> tuple[Namespace, dict[str, Any]]:
    """Parse what defaults depend on alone, before Megatron's parser sees the command line.

    Returns:
        The arguments of ``group``, and those of :data:`presets.ADJUSTABLE` (and ``--optimizer``, ``--yaml-cfg``) that
        are given.
    """
    early = ArgumentParser(add_help=False, allow_abbrev=False)
    early.error = parser.error  # type: ignore[method-assign]
    ours = {action.dest for action in group._group_actions}
    for action in parser._actions:
        if action.dest in {*ours, *presets.ADJUSTABLE, "optimizer", "yaml_cfg"}:
            kept: dict[str, Any] = {name: getattr(action, name) for name in ("dest", "type", "choices", "nargs")}
            if action.nargs == 0:  # a flag
                kept = {"dest": action.dest, "action": "store_const", "const": action.const}
            default = action.default if action.dest in ours else SUPPRESS
            early.add_argument(*action.option_strings, **kept, default=default)
    chosen = early.parse_known_args(words)[0]
    sizes = {name: value for name, value in vars(chosen).items() if name not in ours}
    return chosen, sizes


def exo_config_from_args(args: Namespace) -> ExoConfig:
    """The variant named on the command line with the axes given beside it.

    Raises:
        ExoConfigError: an unknown variant, or axes that contradict each other.
    """
    changes = {axis: value for axis in _AXES if (value := getattr(args, f"exo_{axis}")) is not None}
    return get_variant(args.exo_variant).exo.replace(**changes)


def megatron_defaults() -> dict[str, object]:
    """Defaults of Megatron's own arguments: what the architecture fixes, and what this machine can run."""
    architecture: dict[str, object] = {
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "add_bias_linear": False,
        "swiglu": True,
        "position_embedding_type": "rope",
        "rotary_base": 500000,
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "adam_beta2": 0.95,
        **muon.MEGATRON_DEFAULTS,
    }
    # Causal attention needs no mask from the loader; checkpoints can be read at any layout.
    habits: dict[str, object] = {
        "calculate_per_token_loss": True,  # every token weighs the same, whatever micro-batch it is in
        "create_attention_mask_in_dataloader": False,
        "dist_ckpt_optim_fully_reshardable": True,
        "exit_signal_handler": True,
        "rerun_mode": "disabled",  # a NaN ends the run at once, with its batch saved (nonfinite.py)
        "distributed_backend": platform.communication_backend(),
        "transformer_impl": default_transformer_impl(),
        "async_strategy": "nvrx" if platform.is_gpu() and find_spec("nvidia_resiliency_ext") else "mcore",
        "use_persistent_ckpt_worker": True,  # without it, Megatron ignores --async-save
    }
    if habits["transformer_impl"] == "local":
        # Kernels that only Transformer Engine or Apex bring.
        habits |= {"gradient_accumulation_fusion": False, "masked_softmax_fusion": False, "apply_rope_fusion": False}
        habits |= {"no_persist_layer_norm": True}
    if not platform.is_gpu():
        habits |= {"bias_swiglu_fusion": False, "bias_dropout_fusion": False, "bias_gelu_fusion": False}
    return architecture | habits


def default_transformer_impl() -> str:
    """``transformer_engine`` on a GPU where it is installed, ``local`` otherwise."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return "transformer_engine" if HAVE_TE and platform.is_gpu() else "local"
