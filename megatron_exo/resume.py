"""What ``--load`` names: whether it is a whole checkpoint, and one of the model of this run."""

from __future__ import annotations

import dataclasses
import os
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_exo import console
from megatron_exo.arguments import option
from megatron_exo.checkpoints.integrity import damages, newest_whole, read_manifest
from megatron_exo.checkpoints.manifest import POSITIONS
from megatron_exo.checkpoints.reading import (
    TRACKER,
    CheckpointError,
    DamagedCheckpointError,
    check_files_of_ranks,
    check_objects,
    folder_named_in,
    folder_of,
    read_index,
    read_saved_arguments,
)
from megatron_exo.config import ExoConfig
from megatron_exo.same_run import KINDS, changes, starts_anew
from megatron_exo.schedule import is_extension, schedule_of
from megatron_exo.variants import name_of

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
_IN_OPTIMIZER_STATE = ("adam_beta1", "adam_beta2", "adam_eps")
"""Arguments of which the optimizer's state, once it is loaded, has the values that count."""

_RATES = ("lr", "min_lr", "exo_adam_lr", "weight_decay", "start_weight_decay", "end_weight_decay")

_LONGEST_LIST = 8


def check_load(args: Namespace, exo: ExoConfig) -> None:
    """Check the checkpoint that the run would load, if there is one.

    A folder without any checkpoint is none where the run saves to it: the first start of a run names it already.

    The files are compared with the manifest's checksums by one process of each machine, which takes its share of them,
    unless ``--no-verify-checkpoint`` says not to.

    Raises:
        CheckpointError: it is damaged, incomplete or another model's, or there is none where there has to be one.
    """
    for name in ("load", "pretrained_checkpoint"):
        _refuse_one_checkpoint(name, getattr(args, name))
    _name_what_no_tracker_names(args)
    folder = folder_to_load(args)
    if folder is None:
        _check_first_start(args)
        return
    if args.load is None or folder.parent != Path(args.load):
        args = Namespace(**vars(args) | {"finetune": True})  # as Megatron sets it once it loads from elsewhere
    try:
        if check_files_of_ranks(folder):
            return
        for damage in damages(folder, checksums=args.verify_checkpoint and _reads_files(), share=_share_of_files()):
            raise DamagedCheckpointError(damage)
        index = read_index(folder)
        if _reads_files():
            check_objects(folder, index, share=_share_of_files())
        saved = _plain_values(read_saved_arguments(folder, index))
    except DamagedCheckpointError as error:
        earlier = _offer(folder.parent, args, before=folder)
        raise CheckpointError(f"{error}; copy it again, or {earlier}") from error
    try:
        differences, before = list(_model_differences(saved, args, exo)), schedule_of(saved)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {folder} does not say what model and schedule it is of ({error}); pass another iteration"
        ) from error
    if differences:
        raise CheckpointError(
            f"checkpoint {folder} is of another model: {'; '.join(differences)}; "
            "pass the arguments it was trained with, or another --load"
        )
    if not starts_anew(args):
        _check_optimizer(folder, saved, args)
    if os.environ.get("RANK", "0") == "0":
        _check_same_run(folder, saved, args)
    if args.use_checkpoint_opt_param_scheduler and not starts_anew(args):
        for name in _RATES:  # parameters are grouped by them; the rest Megatron's scheduler takes from the checkpoint
            setattr(args, name, getattr(saved, name, None))
    has_decided = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    if starts_anew(args) or has_decided or (schedule := schedule_of(args)) == before:
        return
    if is_extension(saved, args):
        args.override_opt_param_scheduler = True
        lengths = before["train samples"], schedule["train samples"]
        console.say(
            f"{folder} was planned for {lengths[0]:,} samples, now {lengths[1]:,}: its learning rates so far are those "
            "of the new plan"
        )
        return
    changes = [f"{name} {before[name]}, not {ours}" for name, ours in schedule.items() if before[name] != ours]
    raise CheckpointError(
        f"checkpoint {folder} was trained on another schedule: {'; '.join(changes)}; pass "
        "--override-opt-param-scheduler to go on with this command line's, or --use-checkpoint-opt-param-scheduler "
        "to keep the checkpoint's"
    )


def _refuse_one_checkpoint(name: str, path: str | None) -> None:
    """Refuse the folder of one iteration in the place of a run's, which Megatron would find nothing in."""
    if path is not None and (match := re.fullmatch(r"iter_(\d+)", Path(path).name)) and Path(path).is_dir():
        raise CheckpointError(
            f"{option(name)} {path} is one checkpoint, and not the folder of a run; pass {option(name)} "
            f"{Path(path).parent} --ckpt-step {int(match[1])}"
        )


def _check_first_start(args: Namespace) -> None:
    """Whether a run may begin with random weights although a checkpoint to load is named, and none is there."""
    if args.pretrained_checkpoint is not None:
        raise CheckpointError(f"--pretrained-checkpoint {args.pretrained_checkpoint} holds none; check the path")
    if args.exit_on_missing_checkpoint:
        raise CheckpointError(
            f"--load {args.load} holds no checkpoint; check the path, or leave out --exit-on-missing-checkpoint"
        )
    if args.finetune or not _is_saved_to(args.load, args):
        why = "--finetune needs its weights" if args.finetune else "it is not the folder of --save"
        raise CheckpointError(
            f"--load {args.load} holds no checkpoint, and {why}; check the path, or leave out --load to begin with "
            "random weights"
        )


def check_save(args: Namespace) -> None:
    """Refuse to train over the checkpoints in ``--save`` without going on from them, and say so of going back.

    Raises:
        CheckpointError: there are some, and the run would begin with other weights.
    """
    if args.save is None or args.skip_train or args.replay is not None:
        return
    newest = newest_whole(Path(args.save), checksums=False)
    if newest is None:
        return
    if args.finetune or not _is_saved_to(args.load, args):
        way_on = "leave out --finetune" if _is_saved_to(args.load, args) else f"pass --load {args.save}"
        if args.finetune:
            way_out = f"another folder as both --save and --load, with --pretrained-checkpoint {args.load}"
        else:
            way_out = "another --save"
        raise CheckpointError(
            f"--save {args.save} has checkpoints up to iteration {newest}, and a run that does not go on from one "
            f"of them would write over them; {way_on} to go on from the newest, or pass {way_out}"
        )
    if args.ckpt_step is not None and args.ckpt_step < newest and os.environ.get("RANK", "0") == "0":
        console.say(
            f"going back to checkpoint {args.ckpt_step} of {args.save}, which has some up to {newest}: those are "
            "written over as the run gets there; leave out --ckpt-step at the next start, which would go back again"
        )


def _is_saved_to(load: str | None, args: Namespace) -> bool:
    """Whether a folder to load from is that of ``--save``, however they are spelled."""
    return load is not None and args.save is not None and Path(load).resolve() == Path(args.save).resolve()


def _check_optimizer(folder: Path, saved: Namespace, args: Namespace) -> None:
    """Refuse another optimizer than the checkpoint's, or one with numbers that its state would go on without."""
    way_out = "pass what it was trained with, or --finetune to go on from its weights alone"
    if saved.optimizer != args.optimizer:
        raise CheckpointError(
            f"checkpoint {folder} was trained with --optimizer {saved.optimizer}, whose state does not fit "
            f"{args.optimizer}; {way_out}"
        )
    found = [(name, getattr(saved, name), getattr(args, name)) for name in _IN_OPTIMIZER_STATE]
    if changed := [f"{name} {before}, not {now}" for name, before, now in found if before != now]:
        raise CheckpointError(
            f"checkpoint {folder} has in its optimizer's state what Megatron goes on with: {'; '.join(changed)}; "
            f"{way_out}"
        )


def _check_same_run(folder: Path, saved: Namespace, args: Namespace) -> None:
    """Refuse another tokenizer, data, sequence length or batch size than the checkpoint's, unless it is meant."""
    try:
        found = list(changes(saved, read_manifest(folder), args))
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"checkpoint {folder} does not say in its manifest what it was trained on ({type(error).__name__}: "
            f"{str(error)[:80]}); pass another iteration"
        ) from error
    accepted = set(args.exo_accept_change or ())
    refused = [(kind, text) for kind, text in found if kind not in accepted]
    if refused:
        kinds = [kind for kind in KINDS if kind in {kind for kind, _ in refused} | accepted]
        raise CheckpointError(
            f"checkpoint {folder} was trained on something else: "
            f"{'; '.join(f'{kind}: {text}' for kind, text in refused)}; pass the arguments it was trained with, "
            f"or, if that is meant, --exo-accept-change {' '.join(kinds)}"
        )
    for kind, text in found:
        console.say(f"accepted: {kind} of {folder}: {text}")


def _plain_values(args: Namespace) -> Namespace:
    """The arguments that are one value or a few: those that are compared, and of a size that a message can hold."""

    def is_plain(value: object) -> bool:
        return isinstance(value, bool | int | float | str | None)

    def is_short(value: object) -> bool:
        return isinstance(value, list) and len(value) <= _LONGEST_LIST and all(map(is_plain, value))

    return Namespace(**{name: value for name, value in vars(args).items() if is_plain(value) or is_short(value)})


def _reads_files() -> bool:
    """Whether this process is the one of its machine that reads whole files, and speaks of them."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _share_of_files() -> tuple[int, int]:
    """This machine's number, and how many there are."""
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return rank // here, -(-world_size // here)


def _offer(root: Path, args: Namespace, *, before: Path | None = None) -> str:
    """What to pass instead of a checkpoint that cannot be loaded: the newest whole one before it, if there is one."""
    limit = int(before.name.removeprefix("iter_")) if before is not None and before.name.startswith("iter_") else None
    step = newest_whole(root, before=limit, checksums=args.verify_checkpoint and _reads_files())
    if step is None:
        return f"start anew from another folder: {root} holds no whole checkpoint{' before it' if before else ''}"
    return f"go on from the newest whole one{' before it' if before else ''} with --ckpt-step {step}"


def _name_what_no_tracker_names(args: Namespace) -> None:
    """Go on from the newest whole checkpoint of ``--load`` if a first save was cut short just before its tracker."""
    if args.load is None or args.ckpt_step is not None or (Path(args.load) / TRACKER).exists():
        return
    step = newest_whole(Path(args.load), checksums=False)
    if step is not None:
        args.ckpt_step = step
        args.pretrained_checkpoint = None  # which Megatron would read where there is no tracker
        if os.environ.get("RANK", "0") == "0":
            console.say(f"{args.load} has no {TRACKER}: going on from its newest whole checkpoint, {step}")


def folder_to_load(args: Namespace) -> Path | None:
    """The folder ``iter_NNNNNNN`` that Megatron will read, or ``None`` if there is no checkpoint to load.

    Raises:
        CheckpointError: what the command line or the tracker names is not there, or the tracker is not and checkpoints
            are: going on without them would write over them.
    """
    for root in (Path(each) for each in (args.load, args.pretrained_checkpoint) if each is not None):
        tracker = root / TRACKER
        if args.ckpt_step is not None:
            folder = folder_of(root, args.ckpt_step)
        elif tracker.is_file():
            try:
                folder = folder_named_in(tracker)
            except CheckpointError as error:
                raise CheckpointError(f"{error}, or {_offer(root, args)}") from error
        elif (step := newest_whole(root, checksums=False)) is not None:
            raise CheckpointError(
                f"{root} holds checkpoints but no {TRACKER}, which names the one to load; pass --ckpt-step {step} for "
                "the newest whole one"
            )
        else:
            continue
        if not folder.is_dir():
            there = ", ".join(sorted(path.name for path in root.glob("iter_*"))) or "none"
            raise CheckpointError(f"{folder} is missing (there: {there}); {_offer(root, args, before=folder)}")
        return folder
    return None


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
    for name in _SHAPES if args.finetune else _SHAPES + POSITIONS + ("layernorm_epsilon",):
        if getattr(saved, name) != getattr(args, name):
            yield f"{name} {getattr(saved, name)}, not {getattr(args, name)}"


def _query_groups(args: Namespace) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads
