"""What a checkpoint says of itself, in JSON: enough to rebuild the model, to read the tokens, and to check the files.

Whatever is in the checkpoint already is taken from there, not from the running process: an asynchronous save ends
several steps after the one that it holds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import megatron_exo
from megatron_exo.checkpoints.integrity import FORMAT_VERSION, MANIFEST, digest_of, take_digest
from megatron_exo.checkpoints.reading import DamagedCheckpointError, read_index, read_shared_state
from megatron_exo.checkpoints.sources import describe_data, describe_tokenizer, tokenizer_files
from megatron_exo.config import ExoConfig
from megatron_exo.files import replacing
from megatron_exo.variants import name_of

TOKENIZER_FOLDER = "tokenizer"
_PATIENCE_S = 90
LARGEST_COPY = 50_000_000
"""Bytes up to which a file of the tokenizer is copied into every checkpoint; all common ones are smaller."""

_SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "kv_channels",
    "ffn_hidden_size",
    "vocab_size",
    "padded_vocab_size",
    "seq_length",
    "max_position_embeddings",
)
POSITIONS = ("position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved")
"""Arguments that no shape tells of: with another value the weights fit and compute something else."""
_LAYOUT = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "exo_wire",
)


def write_manifest(folder: Path) -> None:
    """Describe a checkpoint whose other files are all written; nothing for one that is not an ExoFormer's.

    Raises:
        OSError: the disk is full or forbidden.
        DamagedCheckpointError: what has just been written cannot be read.
    """
    index = _index_of_all(folder)
    state = read_shared_state(folder, index)
    if not hasattr(state.get("args"), "exo_variant"):
        return
    content = describe(state["args"], state["iteration"], index) | _circumstances(state["args"])
    for name in _copy_tokenizer(tokenizer_files(state["args"]), folder / TOKENIZER_FOLDER):
        content["tokenizer"]["files"][name]["copied"] = True
    content["files"] = dict(_files(folder, index))
    with replacing(folder / MANIFEST) as file:
        file.write(json.dumps({"sha256": digest_of(content), **content}, indent=1) + "\n")


def _index_of_all(folder: Path) -> Metadata:
    """The index once all files are there: over NFS, one machine may see late what another has written."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return read_index(folder)
        except DamagedCheckpointError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def _files(folder: Path, index: Metadata) -> Iterator[tuple[str, dict[str, Any]]]:
    names = {part.relative_path for part in index.storage_data.values()} | {".metadata", "metadata.json"}
    names |= {f"{TOKENIZER_FOLDER}/{path.name}" for path in (folder / TOKENIZER_FOLDER).glob("*")}
    for name in sorted(names):
        yield name, {"bytes": (folder / name).stat().st_size, "sha256": take_digest(folder / name)}


def describe(args: Namespace, step: int, index: Metadata) -> dict[str, Any]:
    """What a checkpoint of an ExoFormer holds, as far as it says that itself; without a manifest, too.

    Args:
        args: of the run that saved it (:func:`~.reading.read_saved_arguments`).
        step: how many there were.
        index: of the checkpoint (:func:`~.reading.read_index`).
    """
    samples = args.consumed_train_samples
    tensors = [each for each in index.state_dict_metadata.values() if isinstance(each, TensorStorageMetadata)]
    return {
        "format": "megatron_exo checkpoint",
        "format_version": FORMAT_VERSION,
        "step": step,
        "consumed_samples": samples,
        "consumed_tokens": samples * args.seq_length,
        "model": _model(args),
        "tensors": {
            "count": len(tensors),
            "bytes": sum(math.prod(each.size) * each.properties.dtype.itemsize for each in tensors),
        },
        "layout": {name: getattr(args, name) for name in _LAYOUT},
        "arguments": {name: plain(value) for name, value in sorted(vars(args).items())},
    }


def _circumstances(args: Namespace) -> dict[str, Any]:
    """What only the program knows that saves: when, with what, by which command, from which data."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "tokenizer": describe_tokenizer(args),
        "data": describe_data(args),
        "versions": {
            "megatron_exo": megatron_exo.__version__,
            "megatron_core": version("megatron-core"),  # its own attribute names the commit of the current folder
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": sys.version.split()[0],
        },
        "command": sys.argv,
    }


def _model(args: Namespace) -> dict[str, Any]:
    """What a model is rebuilt from: its variant, by name and axis by axis, sizes, positions and precision."""
    exo = ExoConfig(**{axis.name: getattr(args, f"exo_{axis.name}") for axis in dataclasses.fields(ExoConfig)})
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    return {
        "variant": name_of(exo),
        "exo": dataclasses.asdict(exo),
        **{name: getattr(args, name) for name in _SIZES},
        "num_query_groups": groups,
        "tied_embeddings": not args.untie_embeddings_and_output_weights,
        **{name: getattr(args, name) for name in POSITIONS},
        "normalization": args.normalization,
        "layernorm_epsilon": args.layernorm_epsilon,
        "dtype": str(args.params_dtype).removeprefix("torch."),
    }


def _copy_tokenizer(files: Iterable[Path], folder: Path) -> list[str]:
    """Copy those of a tokenizer's files that are small into ``folder``; their names."""
    small = [file for file in files if file.stat().st_size <= LARGEST_COPY]
    for file in small:
        folder.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / file.name)
    return [file.name for file in small]


def plain(value: Any) -> Any:
    """A value as JSON knows it, or else its text."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    return str(value)
