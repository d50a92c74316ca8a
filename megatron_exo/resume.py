"""What ``--load`` names: whether it is a whole checkpoint, and one of the model of this run.

A ``torch_dist`` checkpoint is a folder with an index (``.metadata``, a pickle of PyTorch's distributed checkpoints)
and the bytes it points to (``*.distcp``). Among those is the state that all ranks share, with the arguments of the
run that saved it. Both are read here as data: no class is created that such a file does not need.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import re
from argparse import Namespace
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from megatron.core.safe_globals import SAFE_GLOBALS
from torch.distributed.checkpoint.metadata import Metadata

from megatron_exo.config import ExoConfig
from megatron_exo.errors import UserError
from megatron_exo.variants import name_of

TRACKER = "latest_checkpointed_iteration.txt"
_SHAPES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "kv_channels",
    "ffn_hidden_size",
    "vocab_size",
    "untie_embeddings_and_output_weights",
)
"""Megatron's arguments that shapes follow from, beside the query groups and the axes of the variant."""
_POSITIONS = ("position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved")
"""Those that no shape tells of: with another value the weights fit and compute something else."""


class CheckpointError(UserError):
    """A checkpoint that a run cannot go on from: which folder, what is wrong, what to do."""


def check_load(args: Namespace, exo: ExoConfig) -> None:
    """Check the checkpoint that the run would load, if there is one.

    A folder without any checkpoint is none: the first start of a run names the folder it will save to.

    Raises:
        CheckpointError: it is damaged, incomplete or another model's.
    """
    folder = folder_to_load(args)
    if folder is None:
        if args.load is not None and args.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"--load {args.load} holds no checkpoint; check the path, or leave out --exit-on-missing-checkpoint"
            )
        if args.pretrained_checkpoint is not None:
            raise CheckpointError(f"--pretrained-checkpoint {args.pretrained_checkpoint} holds none; check the path")
        return
    if any(folder.glob("mp_rank_*")) and not (folder / "metadata.json").exists():
        return  # Megatron's older format: one file a rank, and no index
    saved = read_saved_arguments(folder, read_index(folder))
    if differences := list(_model_differences(saved, args, exo)):
        raise CheckpointError(
            f"checkpoint {folder} is of another model: {'; '.join(differences)}; "
            "pass the arguments it was trained with, or another --load"
        )
    starts_anew = args.finetune or args.no_load_optim or args.skip_train
    has_decided = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    if starts_anew or has_decided or (schedule := _schedule(args)) == (before := _schedule(saved)):
        return
    changes = [f"{name} {before[name]}, not {ours}" for name, ours in schedule.items() if before[name] != ours]
    raise CheckpointError(
        f"checkpoint {folder} was trained on another schedule: {'; '.join(changes)}; pass "
        "--override-opt-param-scheduler to go on with this command line's, or --use-checkpoint-opt-param-scheduler "
        "to keep the checkpoint's"
    )


def folder_to_load(args: Namespace) -> Path | None:
    """The folder ``iter_NNNNNNN`` that Megatron will read, or ``None`` if there is no checkpoint to load."""
    for root in (args.load, args.pretrained_checkpoint):
        if root is None:
            continue
        tracker = Path(root) / TRACKER
        if args.ckpt_step is not None:
            name = f"iter_{args.ckpt_step:07d}"
        elif tracker.is_file():
            text = tracker.read_text(errors="replace").strip()
            if text != "release" and not text.isdecimal():
                raise CheckpointError(
                    f"{tracker} does not name an iteration but {text[:40]!r}; "
                    "write the number of a folder iter_N there, or pass it as --ckpt-step"
                )
            name = text if text == "release" else f"iter_{int(text):07d}"
        else:
            continue
        if not (folder := Path(root) / name).is_dir():
            there = ", ".join(sorted(path.name for path in Path(root).glob("iter_*"))) or "none"
            raise CheckpointError(f"{folder} is missing (there: {there}); pass another iteration as --ckpt-step")
        return folder
    return None


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint, after a look at the files that it points to.

    Raises:
        CheckpointError: the index or one of the files is missing, cut off or not what it should be.
    """
    path = folder / ".metadata"
    if not path.is_file() or not (folder / "metadata.json").is_file():
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no index; {_REMEDY}")
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(index).__name__}")
        ends: dict[str, int] = {}
        for part in (index.storage_data or {}).values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise CheckpointError(f"{path} is damaged: {_first_sentence(error)}; {_REMEDY}") from error
    for name, end in ends.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < end:
            state = "missing" if size is None else f"cut off: {size} bytes of {end}"
            raise CheckpointError(f"{folder} is no complete checkpoint: {name} is {state}; {_REMEDY}")
    return index


_REMEDY = "copy it again, or pass an earlier iteration as --ckpt-step"


def _first_sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0]


class _IndexUnpickler(pickle.Unpickler):
    """Reads a ``.metadata`` file and nothing else: plain data classes of PyTorch's checkpoints, sizes and dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in _PLAIN or module.startswith("torch.distributed.checkpoint."):
            found = super().find_class(module, name)
            is_data = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum))
            if is_data or (module, name) in _PLAIN:
                return found
        raise pickle.UnpicklingError(f"it names {module}.{name}, which an index does not need")


_PLAIN = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")}


def read_saved_arguments(folder: Path, index: Metadata) -> Namespace:
    """The arguments of the run that saved a checkpoint, as they were after validation.

    Raises:
        CheckpointError: they cannot be read, or are not those of an ExoFormer.
    """
    parts = index.storage_data or {}
    part = next((part for key, part in parts.items() if re.match(r"common_state\b", key.fqn)), None)
    if part is None:
        raise CheckpointError(f"{folder} does not say what model it is of: it was not saved by this program's training")
    try:
        with (folder / part.relative_path).open("rb") as file:
            file.seek(part.offset)
            state = io.BytesIO(file.read(part.length))
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            args = torch.load(state, map_location="cpu", weights_only=True)[0]["args"]
    except Exception as error:  # damaged bytes raise whatever they like
        raise CheckpointError(f"{folder}: its shared state is damaged: {_first_sentence(error)}; {_REMEDY}") from error
    if not hasattr(args, "exo_variant"):
        raise CheckpointError(f"{folder} is not of an ExoFormer; load it into the program that saved it")
    return args


def _model_differences(saved: Namespace, args: Namespace, exo: ExoConfig) -> Iterator[str]:
    """What the checkpoint's model is, and what the run's is, where that differs."""
    fields = dataclasses.fields(ExoConfig)
    axes: dict[str, Any] = {axis.name: getattr(saved, f"exo_{axis.name}", axis.default) for axis in fields}
    # Interventions remove terms of a trained model, they make no other one.
    theirs, ours = (each.replace(drop_anchor="", drop_current="") for each in (ExoConfig(**axes), exo))
    if theirs != ours:
        names = [name_of(each) or "one without a name" for each in (theirs, ours)]
        changed = [axis for axis in axes if getattr(theirs, axis) != getattr(ours, axis)]
        values = ", ".join(f"{axis.replace('_', ' ')} {getattr(theirs, axis) or 'none'}" for axis in changed)
        yield f"variant {names[0]} ({values}), not {names[1]}"
    if _query_groups(saved) != _query_groups(args):
        yield f"num_query_groups {_query_groups(saved)}, not {_query_groups(args)}"
    for name in _SHAPES if args.finetune else _SHAPES + _POSITIONS:
        if getattr(saved, name) != getattr(args, name):
            yield f"{name} {getattr(saved, name)}, not {getattr(args, name)}"


def _query_groups(args: Namespace) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def _schedule(args: Namespace) -> dict[str, Any]:
    """What Megatron's scheduler compares with a checkpoint's, in its unit: samples."""
    unit, batch = ("samples", 1) if args.train_samples else ("iters", args.global_batch_size)
    length = getattr(args, f"train_{unit}") * batch
    decay = (getattr(args, f"lr_decay_{unit}") or 0) * batch or length
    warmup = getattr(args, f"lr_warmup_{unit}") * batch
    if args.lr_warmup_fraction is not None:
        warmup = args.lr_warmup_fraction * decay
    return {
        "lr": args.lr,
        "min_lr": args.min_lr,
        "lr_decay_style": args.lr_decay_style,
        "warm-up samples": warmup,
        "decay samples": decay,
        "weight_decay": args.weight_decay,
        "train samples": length,
    }
