"""Whether a run that goes on from a checkpoint is still the same run: what it reads, and in which portions.

Of the model itself and the learning rate, see :mod:`megatron_exo.resume`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_exo.checkpoints.sources import describe_data, describe_tokenizer
from megatron_exo.optimizer.recipe import MUON_OPTIONS, recipe_from_args

KINDS = ("tokenizer", "data", "seq-length", "batch-size", "training")
"""What ``--exo-accept-change`` can name."""

_SAMPLES = ("exo_documents", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Arguments that change what is learned from the same tokens."""
_BEFORE_THERE_WAS = {"exo_documents": "joined"}
"""What checkpoints did that do not have an argument yet."""
_BATCHES = ("global_batch_size", "rampup_batch_size", "step_batch_size_schedule")
_TRAINING = (
    "clip_grad",
    "attention_dropout",
    "hidden_dropout",
    "exo_z_loss_weight",
    "bf16",
    "fp16",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
)
"""Arguments that the updates depend on, beside the learning rate and what an optimizer's state goes on with."""
_MUON = (
    "muon_momentum",
    "muon_nesterov",
    "muon_scale_mode",
    "muon_extra_scale_factor",
    "muon_coefficient_type",
    "muon_num_ns_steps",
)
_TRAINED_ON = ("all", "train")
"""The parts of a dataset that order and content of training samples depend on."""


def changes(saved: Namespace, manifest: Mapping[str, Any] | None, args: Namespace) -> Iterator[tuple[str, str]]:
    """What is not as it was when the checkpoint was saved: one of :data:`KINDS`, and both values.

    Args:
        saved: the arguments of the run that saved it.
        manifest: of the checkpoint; without one, tokenizer and data are not compared.
        args: of the run that goes on.
    """
    if manifest is not None:
        yield from _tokenizer_changes(manifest["tokenizer"], describe_tokenizer(args))
        if starts_anew(args):
            return
        for difference in _data_changes(manifest["data"], describe_data(args)):
            yield "data", difference
    elif starts_anew(args):
        return
    for kind, names in (("data", _SAMPLES), ("seq-length", ("seq_length",)), ("batch-size", _BATCHES)):
        for name in names:
            if (before := getattr(saved, name, _BEFORE_THERE_WAS.get(name))) != (now := getattr(args, name)):
                yield kind, f"{name} {before}, not {now}"
    yield from (("training", difference) for difference in _training_changes(saved, args))


def _training_changes(saved: Namespace, args: Namespace) -> Iterator[str]:
    is_muon = saved.optimizer == args.optimizer == "muon"
    before, now = ({name: getattr(each, name, None) for name in _TRAINING} for each in (saved, args))
    if is_muon:
        for values, each in ((before, saved), (now, args)):
            recipe = {name: getattr(recipe_from_args(each), field) for field, name in MUON_OPTIONS.items()}
            values |= {name: getattr(each, name) for name in _MUON} | recipe
            del values["exo_adam_lr"]  # of the schedule
    for name, value in now.items():
        if hasattr(saved, name) and before[name] != value:
            yield f"{name} {before[name]}, not {value}"


def starts_anew(args: Namespace) -> bool:
    """Whether the run takes weights from the checkpoint and does not go on with its training."""
    return bool(args.finetune or args.no_load_optim or args.skip_train)


def _tokenizer_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """By what the tokenizers do, if that is known of both: files may have moved, or be in another format."""
    prints = before.get("fingerprint"), now["fingerprint"]
    is_other = prints[0] != prints[1] if all(prints) else before["type"] != now["type"]
    if is_other:
        named = [f"{each['type']} {each['model'] or ''}".rstrip() for each in (before, now)]
        difference = f"{named[0]}, not {named[1]}" if named[0] != named[1] else f"{named[0]}, with another content"
        yield "tokenizer", difference


def _data_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for name in ("seed", "split"):
        if before[name] != now[name]:
            yield f"{name} {before[name]}, not {now[name]}"
    sets = [_sets(each) for each in (before, now)]
    if sets[0] != sets[1]:
        yield f"{_format(before)}, not {_format(now)}" + (
            " (the files have changed)" if _format(before) == _format(now) else ""
        )


def _sets(data: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """Each dataset that is trained on, by its content: where it lies does not matter."""
    trained_on = [each for each in data["sets"] if each["part"] in _TRAINED_ON]
    total = sum(each["weight"] or 0 for each in trained_on) or 1
    return [
        (each["part"], each["bin_bytes"], each["idx_sha256"], each["weight"] and round(each["weight"] / total, 9))
        for each in trained_on
    ]


def _format(data: Mapping[str, Any]) -> str:
    sets = [
        each["prefix"] if each["weight"] is None else f"{each['weight']:g} × {each['prefix']}"
        for each in data["sets"]
        if each["part"] in _TRAINED_ON
    ]
    return " + ".join(sets) or ("mock data" if data["mock"] else data.get("unreadable", "no data"))
