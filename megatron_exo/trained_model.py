"""A checkpoint of a run as a model on the ranks of this program, whatever layout it was trained on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.checkpointing import load_checkpoint

from megatron_exo.checkpoints.inspection import checkpoint_at, described_as_here, read_description
from megatron_exo.checkpoints.manifest import TOKENIZER_FOLDER
from megatron_exo.convert.checkpoint_tensors import model_of
from megatron_exo.convert.importing import architecture_arguments
from megatron_exo.errors import UserError
from megatron_exo.files import is_plain_name
from megatron_exo.startup import Start, connect, understand


@dataclass(frozen=True)
class TrainedModel:
    """On this rank.

    Args:
        start: arguments, tokenizer, variant and configuration.
        chunks: in order of virtual stages, in eval mode.
        groups: Megatron's process groups.
        step: how many it has been trained.
    """

    start: Start
    chunks: list[torch.nn.Module]
    groups: ProcessGroupCollection
    step: int


def load_trained_model(path: Path, megatron_arguments: Sequence[str]) -> TrainedModel:
    """Build and load the model of a checkpoint, with Megatron's own loading; process groups are made.

    Args:
        path: of a run, or of one ``iter_N`` in it.
        megatron_arguments: the layout, and whatever else overrides what the checkpoint says.

    Raises:
        UserError: there is no checkpoint, it is damaged, or arguments do not fit.
    """
    folder = checkpoint_at(path)
    sys.argv[1:] = [*model_arguments(folder, read_description(folder)), *megatron_arguments]
    start = understand()
    groups = connect(start.args.exo_start_timeout, start.args.exo_lost_host_timeout)
    model_parallel_cuda_manual_seed(start.args.seed)  # the random weights are overwritten, but drawn
    chunks = start.model_config.get_builder_cls()(start.model_config).build_distributed_models(
        groups, wrap_with_ddp=False, model_type=ModelType.encoder_or_decoder
    )
    load_checkpoint(chunks, None, None)
    for chunk in chunks:
        chunk.eval()
    return TrainedModel(start, chunks, groups, int(folder.name.removeprefix("iter_")))


def model_arguments(folder: Path, described: Mapping[str, Any]) -> list[str]:
    """The command line with which Megatron builds and loads the model of a checkpoint.

    The tokenizer is the copy that the checkpoint carries, or else the one that it was trained with.

    Raises:
        UserError: the checkpoint's folder is not one of a run, or its model computes what ours does not, or it
            does not say what model it is of.
    """
    if not folder.name.removeprefix("iter_").isdecimal():
        raise UserError(f"{folder} is not a folder iter_N of a run; give one")
    with described_as_here(folder):
        return _model_arguments(folder, described)


def _model_arguments(folder: Path, described: Mapping[str, Any]) -> list[str]:
    exo, sizes = model_of(described)
    words = architecture_arguments(exo, sizes)
    for name, value in (
        ("tokenizer-type", described["arguments"]["tokenizer_type"]),
        ("tokenizer-model", _tokenizer(folder, described)),
        ("load", folder.parent),
        ("ckpt-step", int(folder.name.removeprefix("iter_"))),
        ("micro-batch-size", 1),
        ("eval-interval", 1),
    ):
        words += [f"--{name}", str(value)] if value is not None else []
    flags = ["skip-train", "finetune", "no-load-optim", "no-load-rng", "mock-data"]
    flags += {"bfloat16": ["bf16"], "float16": ["fp16"]}.get(described["model"]["dtype"], [])
    return [*words, *(f"--{flag}" for flag in flags)]


def _tokenizer(folder: Path, described: Mapping[str, Any]) -> str | None:
    named, files = described["arguments"]["tokenizer_model"], described.get("tokenizer", {}).get("files", {})
    if not all(map(is_plain_name, files)):
        raise UserError(f"{folder} names files of a tokenizer that are outside of it; copy it again")
    copies = [folder / TOKENIZER_FOLDER / name for name, record in files.items() if record["copied"]]
    if not copies:
        return None if named is None else str(named)
    # One file is the model itself; of several, their folder is what Megatron's tokenizers take.
    return str(copies[0] if len(copies) == 1 else copies[0].parent)
