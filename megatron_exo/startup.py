"""From a command line to a model configuration and process groups, the same for every program that runs a model."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, get_tokenizer, initialize
from megatron.training.arguments import parse_and_validate_args, parse_args, validate_args
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_exo import accounting, platform
from megatron_exo.argument_checks import check_arguments
from megatron_exo.arguments import add_exo_arguments, exo_config_from_args
from megatron_exo.builder import ExoModelConfig, model_config_from_args
from megatron_exo.config import ExoConfig
from megatron_exo.errors import UserError
from megatron_exo.lost_hosts import watch_hosts
from megatron_exo.optimizer.recipe import recipe_from_args
from megatron_exo.plan import Layout, Plan
from megatron_exo.presets import GPT2_VOCAB_SIZE
from megatron_exo.presets.matching import Matching
from megatron_exo.resume import check_load
from megatron_exo.roll_call import call_roll
from megatron_exo.sizes import ModelSizes
from megatron_exo.variants import get_variant

_LOOPBACK = "lo"
"""Linux's name of the interface that no other machine reaches."""


@dataclass(frozen=True)
class Start:
    """What a program knows once its command line has been understood."""

    args: Namespace
    exo: ExoConfig
    tokenizer: Any
    vocab_size: int
    """Rows of the embedding that stand for tokens: the tokenizer's, or ``--vocab-size`` where that is larger."""
    model_config: ExoModelConfig


def preview() -> Namespace:
    """Parse ``sys.argv`` and check what can be seen from it alone; quick, and prints nothing.

    Makes the folder of ``--save``, where logs go from then on.

    Raises:
        UserError: one line on what cannot be met.
    """
    args = parse_args(add_exo_arguments)
    if args.dry_run:
        raise UserError("--dry-run is an option of training alone; leave it out")
    check_arguments(args)
    if args.save is not None:
        _check_writable(Path(args.save))
    return args


def understand() -> Start:
    """Validate ``sys.argv`` with Megatron, set its global arguments, and work out the model.

    Raises:
        UserError: one line on what cannot be met; nothing has been built or connected by then.
    """
    preview()
    with _megatrons_refusals():
        args = parse_and_validate_args(add_exo_arguments)
    if args.skip_train and not (args.train_iters or args.train_samples):
        args.train_iters = 1  # Megatron prepares a training set all the same
    start = work_out(args, get_tokenizer())
    if args.load is not None or args.pretrained_checkpoint is not None:
        check_load(args, start.exo)
    return start


def rehearse() -> tuple[Start, list[str]]:
    """:func:`understand` for a run that is not to start now or here: makes no folder, and sets no global of Megatron.

    Returns:
        What is known of the run, and what it lacks on this machine. Without its tokenizer, the vocabulary is that of
        ``--vocab-size``, or GPT-2's.

    Raises:
        UserError: one line on what cannot be met.
    """
    args = parse_args(add_exo_arguments)
    lacks = [f"dataset {prefix}" for prefix in _named_datasets(args) if not Path(f"{prefix}.idx").exists()]
    model = args.tokenizer_model
    if model is not None and not Path(model).exists():
        args.tokenizer_type, args.vocab_size = "NullTokenizer", args.vocab_size or GPT2_VOCAB_SIZE
        lacks.append(f"tokenizer {model} (a vocabulary of {args.vocab_size:,} assumed)")
    if args.optimizer == "muon" and find_spec("emerging_optimizers") is None:
        lacks.append("package emerging-optimizers (bash tools/setup_env.sh muon)")
    check_arguments(args)
    with _megatrons_refusals():
        validate_args(args)
        tokenizer = build_tokenizer(args)
    return work_out(args, tokenizer), lacks


def _named_datasets(args: Namespace) -> list[str]:
    """The prefixes on the command line, without their weights."""
    words = chain(*(getattr(args, f"{part}data_path") or () for part in ("", "train_", "valid_", "test_")))
    return [word for word in words if not re.fullmatch(r"[\d.]+", word)]


def work_out(args: Namespace, tokenizer: Any) -> Start:
    """The model of a validated command line; ``args`` are completed by what follows from them."""
    vocab_size = max(tokenizer.vocab_size, args.vocab_size or 0)
    exo = exo_config_from_args(args)
    args.padded_vocab_size = calculate_padded_vocab_size(
        vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
    )
    # The namespace is saved in checkpoints: let it say what the model is, whatever a variant's name means later.
    args.vocab_size = vocab_size
    for axis in dataclasses.fields(exo):
        setattr(args, f"exo_{axis.name}", getattr(exo, axis.name))
    if (matching := reference_of(args, vocab_size)) is not None:
        differences = matching.differences(exo, model_sizes(args, vocab_size))
        args.match_parameters_difference, args.match_flops_difference = differences
    with _megatrons_refusals():
        model_config = model_config_from_args(args, exo, vocab_size)
    return Start(args, exo, tokenizer, vocab_size, model_config)


@contextmanager
def _megatrons_refusals() -> Iterator[None]:
    """Turn what Megatron raises for arguments it does not accept into a :class:`UserError`."""
    try:
        yield
    except UserError:
        raise
    except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
        reason = str(error) or f"it asserts '{traceback.extract_tb(error.__traceback__)[-1].line}'"
        raise UserError(f"Megatron refuses these arguments: {reason}") from error


def connect(start_timeout_s: float, lost_host_timeout_s: float) -> ProcessGroupCollection:
    """Join the ranks and make Megatron's process groups; ``megatron.training.pretrain`` keeps them.

    A single rank meets nobody, and no store listens for it. Tensors of ranks that are all on one machine stay on its
    loopback, unless ``GLOO_SOCKET_IFNAME`` says otherwise.

    Args:
        start_timeout_s: seconds for all ranks to come this far.
        lost_host_timeout_s: seconds after which another host that gives no sign of life ends this job; 0 for never.

    Raises:
        UserError: there are several ranks, and nothing says where they meet, or some do not come.
    """
    # Called by way of its module: the platform replaces it there, maybe after this file was imported.
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if "MASTER_ADDR" not in os.environ and world_size > 1:
        raise UserError("WORLD_SIZE is above 1 but MASTER_ADDR is not set; start with torchrun, which sets both")
    on_one_machine = world_size == 1 or os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)
    if on_one_machine and _LOOPBACK in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    if world_size == 1:
        initialize._initialize_distributed(None, None, dist.HashStore())
    else:
        store = call_roll(start_timeout_s)
        watch_hosts(store, lost_host_timeout_s)
        store.set_timeout(timedelta(minutes=get_args().distributed_timeout_minutes))
        initialize._initialize_distributed(None, None, store)
    return ProcessGroupCollection.use_mpu_process_groups()


def model_sizes(args: Namespace, vocab_size: int) -> ModelSizes:
    """The sizes of a validated command line."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return ModelSizes(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=groups,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        vocab_size=vocab_size,
        seq_length=args.seq_length,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        rotary_base=float(args.rotary_base),
        layernorm_epsilon=args.layernorm_epsilon,
    )


def reference_of(args: Namespace, vocab_size: int) -> Matching | None:
    """What the sizes of a validated command line were matched to, with the tokenizer's vocabulary."""
    if args.match in (None, "none"):
        return None
    sizes = dataclasses.replace(
        model_sizes(args, vocab_size),
        num_layers=args.match_num_layers,
        ffn_hidden_size=args.match_ffn_hidden_size,
    )
    return Matching(args.match, args.match_to, get_variant(args.match_to).exo, sizes)


def device_name() -> str:
    """Of this rank: ``cpu``, or the GPU's name."""
    return torch.cuda.get_device_name() if platform.is_gpu() else "cpu"


def training_plan(start: Start) -> Plan:
    """What is about to be trained, for :func:`megatron_exo.plan.format_plan`."""
    args = start.args
    return Plan(
        exo=start.exo,
        sizes=model_sizes(args, start.vocab_size),
        padded_vocab_size=args.padded_vocab_size,
        layout=Layout(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            data_parallel_size=args.data_parallel_size,
            sequence_parallel=args.sequence_parallel,
            wire=args.exo_wire,
        ),
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        train_iters=0 if args.skip_train else args.train_iters or args.train_samples // args.global_batch_size,
        optimizer="none" if args.skip_train else _describe_optimizer(args),
        device=f"{device_name()} ({args.distributed_backend})",
        precision="bf16, fp32 masters" if args.bf16 else "fp16, fp32 masters" if args.fp16 else "fp32",
        transformer_impl=args.transformer_impl,
        matching=reference_of(args, start.vocab_size),
        documents=args.exo_documents,
        train_tokens=args.train_tokens,
    )


def _describe_optimizer(args: Namespace) -> str:
    rest = f" (adam {recipe_from_args(args).adam_lr:g})" if args.optimizer == "muon" else ""
    return f"{args.optimizer}, lr {args.lr:g}{rest}, {args.lr_decay_style}"


def check_storage(args: Namespace, exo: ExoConfig, vocab_size: int) -> None:
    """Refuse a run whose first checkpoint would not fit where it is to be saved.

    Raises:
        UserError: the folder has less room than one checkpoint needs.
    """
    if args.save is None:
        return
    count = sum(accounting.parameters(exo, model_sizes(args, vocab_size)).values())
    # Weights, and with the optimizer fp32 masters and two moments.
    needed = count * ((2 if args.bf16 or args.fp16 else 4) + (0 if args.no_save_optim else 12))
    free = shutil.disk_usage(args.save).free
    if free < needed:
        raise UserError(
            f"--save {args.save} has {free / 1e9:.1f} GB free and one checkpoint takes about {needed / 1e9:.1f} GB; "
            "make room or choose another folder"
        )


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # of another name on every rank
            pass
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror
        raise UserError(f"--save {folder} cannot be written: {why}; choose another folder") from error
