"""ExoFormer's command-line arguments, beside Megatron's own.

A run names a variant and a size (``--exo-variant``, ``--preset``) and overrides single axes or sizes as it likes.
Everything an ExoFormer needs of Megatron (RMSNorm, RoPE, SwiGLU, no biases, ...) is a default here.
"""

from __future__ import annotations

import difflib
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from megatron_exo import platform, presets
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
        group.add_argument(_option(f"exo_{axis}"), default=None, help=f"{text}; overrides the variant", **values)
    group.add_argument(
        "--exo-z-loss-weight",
        type=float,
        default=1e-5,
        help="weight of the mean squared log-partition in the loss (default: %(default)s)",
    )
    group.add_argument(
        "--exo-log",
        choices=("short", "full"),
        default="short",
        help="what the terminal shows: a plan and one line per log interval, or everything Megatron prints "
        "(which always goes to SAVE/logs)",
    )
    group.add_argument(
        "--preset",
        metavar="NAME",
        default=None,
        help=f"sizes of model and run ({', '.join(presets.PRESETS)}), which any other argument overrides",
    )

    parser.error = partial(_one_line_error, parser)  # type: ignore[method-assign]
    parser.set_defaults(**megatron_defaults())
    chosen, sizes = _early_arguments(parser, group)
    if chosen.preset is not None:
        parser.set_defaults(**presets.resolve(chosen.preset, exo_config_from_args(chosen), sizes))
    return parser


def _one_line_error(parser: ArgumentParser, message: str) -> NoReturn:
    """Without argparse's usage of 700 options; for an unknown option, with the nearest known ones."""
    if message.startswith("unrecognized arguments: "):
        unknown = message.removeprefix("unrecognized arguments: ").split()[0].split("=")[0]
        known = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown, known, n=2)
        message = f"unknown argument {unknown}; "
        message += f"did you mean {' or '.join(near)}?" if near else "--help lists them all"
    leave(message, status=2)


def _early_arguments(parser: ArgumentParser, group: Any) -> tuple[Namespace, dict[str, Any]]:
    """Parse what defaults depend on alone, before Megatron's parser sees the command line.

    Returns:
        The arguments of ``group``, and those of :data:`presets.ADJUSTABLE` that are given.
    """
    early = ArgumentParser(add_help=False, allow_abbrev=False)
    early.error = parser.error  # type: ignore[method-assign]
    ours = {action.dest for action in group._group_actions}
    for action in parser._actions:
        if action.dest in ours or action.dest in presets.ADJUSTABLE:
            kept: dict[str, Any] = {"dest": action.dest, "type": action.type, "choices": action.choices}
            default = action.default if action.dest in ours else SUPPRESS
            early.add_argument(*action.option_strings, **kept, default=default)
    chosen = early.parse_known_args(sys.argv[1:])[0]
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
    }
    # Causal attention needs no mask from the loader; checkpoints can be read at any layout.
    habits: dict[str, object] = {
        "calculate_per_token_loss": True,  # every token weighs the same, whatever micro-batch it is in
        "create_attention_mask_in_dataloader": False,
        "dist_ckpt_optim_fully_reshardable": True,
        "distributed_backend": platform.communication_backend(),
        "transformer_impl": default_transformer_impl(),
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


def check_arguments(args: Namespace) -> None:
    """Refuse what can be seen before anything is built.

    Raises:
        ExoConfigError: one line that says what, why, and what instead.
    """
    if args.yaml_cfg is not None:
        raise ExoConfigError("--yaml-cfg replaces the command line, with ExoFormer's arguments; pass arguments instead")
    exo = exo_config_from_args(args)
    for problem in chain(_missing(args), _misfits(args, exo), _schedule_problems(args), _layout_problems(args)):
        raise ExoConfigError(problem)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _missing(args: Namespace) -> Iterator[str]:
    """What Megatron has no default for, and partly asks for only after the model is built."""
    needed = ["num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"]
    needed += ["micro_batch_size"] if args.skip_train else ["micro_batch_size", "lr", "eval_interval"]
    if missing := [_option(name) for name in needed if getattr(args, name) is None]:
        yield (
            f"the size of the model or of the run is not given: {', '.join(missing)}; pass these, "
            f"or --preset with one of {', '.join(presets.PRESETS)}"
        )
    if not (args.train_iters or args.train_samples or args.skip_train):
        yield "the length of the run is not given; pass --train-iters, --train-samples or --preset"
    if args.tokenizer_type is None:
        yield (
            "no tokenizer; pass --tokenizer-type and --tokenizer-model as the data was made with "
            "(--tokenizer-type NullTokenizer --vocab-size N for --mock-data)"
        )
    elif args.tokenizer_type == "SentencePieceTokenizer" and not Path(args.tokenizer_model or "").is_file():
        yield f"--tokenizer-model {args.tokenizer_model} is no file; pass the SentencePiece .model that made the data"
    if args.save is not None and not args.save_interval:
        yield "--save without --save-interval; pass the number of iterations between checkpoints"


def _misfits(args: Namespace, exo: ExoConfig) -> Iterator[str]:
    """What goes neither with ExoFormer nor with this machine."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if args.transformer_impl == "transformer_engine" and not (HAVE_TE and platform.is_gpu()):
        why = "it is not installed" if not HAVE_TE else "it needs a CUDA device"
        yield (
            f"--transformer-impl transformer_engine cannot be used here: {why}; use --transformer-impl local "
            "(python -m megatron_exo.doctor says what is missing)"
        )
    if (exo.drop_anchor or exo.drop_current) and not args.skip_train:
        yield (
            "--exo-drop-anchor and --exo-drop-current are interventions at inference; "
            "leave them out, or evaluate with --skip-train"
        )
    if args.exo_z_loss_weight < 0:
        yield f"--exo-z-loss-weight must not be negative, got {args.exo_z_loss_weight}; pass 0 for none"
    for name in ("use_megatron_fsdp", "use_torch_fsdp2", "hybrid_layer_pattern", "sft", "perform_rl_step"):
        if getattr(args, name):
            yield f"{_option(name)} is not supported with ExoFormer; leave it out"


def _schedule_problems(args: Namespace) -> Iterator[str]:
    """What Megatron's scheduler would assert after the model is built."""
    if args.skip_train or not (args.train_iters or args.train_samples):
        return
    unit = "iters" if args.train_iters else "samples"
    length = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
    warmup = getattr(args, f"lr_warmup_{unit}")
    if warmup >= length:
        yield (
            f"--lr-warmup-{unit} {warmup} is not shorter than the schedule of {length} {unit}; "
            "pass a shorter warm-up or a longer run"
        )
    if args.lr < args.min_lr:
        yield f"--lr {args.lr:g} is below --min-lr {args.min_lr:g}, which the schedule ends at; pass a smaller --min-lr"
    if args.lr_decay_style == "WSD" and getattr(args, f"lr_wsd_decay_{unit}") is None:
        yield f"--lr-decay-style WSD without --lr-wsd-decay-{unit}; pass the length of its last part"


def _layout_problems(args: Namespace) -> Iterator[str]:
    """How the model cannot be spread over the processes."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if args.world_size % (tp * pp * cp):
        yield (
            f"{args.world_size} processes cannot be divided into groups of "
            f"tp {tp} x pp {pp} x cp {cp} = {tp * pp * cp}; "
            "start torchrun with --nproc-per-node (times --nnodes) a multiple of that"
        )
    if args.num_attention_heads % tp:
        yield (
            f"--num-attention-heads {args.num_attention_heads} is not divisible by --tensor-model-parallel-size {tp}: "
            "each rank holds whole heads; use a tensor-parallel size that divides the heads"
        )
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    if args.num_layers % pp and not (args.pipeline_model_parallel_layout or first or last):
        yield (
            f"--num-layers {args.num_layers} is not divisible by --pipeline-model-parallel-size {pp}; use a size that "
            "divides the layers, or --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers"
        )
