"""From a training checkpoint, or one of the author's, to a folder that transformers loads."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

import megatron_exo
from megatron_exo.checkpoints.inspection import checkpoint_at, described_as_here, read_description
from megatron_exo.checkpoints.integrity import MANIFEST, damages, digest_of, read_manifest, sha256_of
from megatron_exo.checkpoints.manifest import TOKENIZER_FOLDER
from megatron_exo.checkpoints.reading import DamagedCheckpointError, check_objects, read_index
from megatron_exo.config import ExoConfig
from megatron_exo.convert import hub, verification
from megatron_exo.convert.checkpoint_tensors import CheckpointTensors, model_of
from megatron_exo.convert.hf_tokenizer import write_tokenizer
from megatron_exo.convert.hugging_face import hf_config, hf_mapping
from megatron_exo.convert.mapping import ConversionError, ParameterMapping, State
from megatron_exo.convert.model_card import Provenance, model_card
from megatron_exo.convert.reference import read_reference_checkpoint
from megatron_exo.convert.safetensors_writing import (
    DTYPE_NAMES,
    Group,
    Progress,
    plan_shards,
    shard_name,
    write_index,
    write_shard,
)
from megatron_exo.convert.unfinished import UnfinishedFolder, check_free, unfinished
from megatron_exo.errors import UserError
from megatron_exo.sizes import ModelSizes

DTYPES = {"keep": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Our tensors whose rows are tokens, padded in checkpoints."""


class Tensors(Protocol):
    """The whole tensors of a model by our names, read when asked for."""

    def __iter__(self) -> Any: ...

    def __contains__(self, name: object) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class StateTensors:
    """A state that is in memory already."""

    state: State

    def __iter__(self) -> Any:
        return iter(self.state)

    def __contains__(self, name: object) -> bool:
        return name in self.state

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.state[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.state[name].dtype

    def read(self, name: str) -> Tensor:
        return self.state[name]


@dataclass(frozen=True)
class Options:
    """What a user chooses of a conversion.

    Args:
        dtype: of the file's tensors; ``None`` keeps each as it is.
        shard_size: bytes of tensors in a file.
        verify: whether to read all checksums first, and to run both models at the end.
        push_to: a repository of the hub.
    """

    dtype: torch.dtype | None = None
    shard_size: int = 4_000_000_000
    verify: bool = True
    push_to: str | None = None


@dataclass(frozen=True)
class Source:
    """A model to convert, wherever it comes from."""

    exo: ExoConfig
    sizes: ModelSizes
    tensors: Tensors
    come_from: Provenance
    load: verification.Loader
    """How Megatron's model gets the same weights, by another way than the conversion."""
    tokenizer: dict[str, Any]
    """As the manifest describes it."""
    tokenizer_copies: Path


def export_checkpoint(path: Path, out: Path, options: Options) -> None:
    """Convert the checkpoint of a run, saved on any layout, to the folder ``out``.

    Raises:
        CheckpointError: there is none at ``path``, or it is damaged.
        ConversionError: the model is not one of ours, or the result computes something else.
        UserError: ``out`` cannot be written, or ``options`` not met.
    """
    folder = checkpoint_at(path)
    check_free(out)
    export(source_of(folder, checksums=options.verify), out, options)


def source_of(folder: Path, *, checksums: bool) -> Source:
    """The model in the folder of a checkpoint, whose tensors are still to be read; raises as the above."""
    for damage in damages(folder, checksums=checksums):
        raise DamagedCheckpointError(f"{damage}; copy it again, or convert another one")
    description = read_description(folder)
    exo, sizes = model_of(description)
    check_objects(folder, read_index(folder))
    with described_as_here(folder):
        return Source(
            exo,
            sizes,
            CheckpointTensors(folder),
            _provenance(folder, description),
            verification.load_checkpoint(folder),
            description.get("tokenizer", {}),
            folder / TOKENIZER_FOLDER,
        )


def _provenance(folder: Path, description: Mapping[str, Any]) -> Provenance:
    manifest = read_manifest(folder)
    numbers = [description.get(name) for name in ("step", "consumed_tokens")]
    data, versions, command = (description.get(name) or {} for name in ("data", "versions", "command"))
    is_known = all(type(number) is int for number in numbers)
    if not (is_known and isinstance(data, Mapping) and isinstance(versions, Mapping)):
        raise ConversionError(f"{folder / MANIFEST} does not describe a checkpoint as this program does")
    return Provenance(
        source=folder.name,
        sha256=digest_of(manifest) if manifest is not None else sha256_of(folder / ".metadata"),
        step=numbers[0] or 0,
        tokens=numbers[1] or 0,
        data=data,
        versions=versions,
        command=list(command),
        run=folder.parent,
    )


def export_reference(file: Path, out: Path, options: Options) -> None:
    """Convert a ``.pt`` of the author's code; raises as :func:`export_checkpoint`."""
    if not file.is_file():
        raise UserError(f"no file at {file}; give the path of a .pt in the author's format")
    reference = read_reference_checkpoint(file)
    come_from = Provenance(file.name, sha256_of(file), reference.step, reference.tokens)
    load = verification.load_state(reference.state)
    source = Source(reference.exo, reference.sizes, StateTensors(reference.state), come_from, load, {}, file.parent)
    export(source, out, options)


def export(source: Source, out: Path, options: Options) -> None:
    """Write ``out``: weights, configuration, code, tokenizer and card; hold it against Megatron; push it if asked.

    A killed conversion leaves ``OUT.partial``, and the same call goes on with it. Raises as :func:`export_checkpoint`.
    """
    if options.push_to is not None:
        hub.check_hub(options.push_to)
    shards = plan_shards(groups_of(source, options.dtype), options.shard_size)
    identity = {
        "source": source.come_from.sha256,
        "dtypes": _digest([[*group.row.their_names, str(group.dtype)] for shard in shards for group in shard]),
        "shard_size": options.shard_size,
        "version": megatron_exo.__version__,
    }
    _check_room(out, sum(group.nbytes() for shard in shards for group in shard))
    with unfinished(out, identity) as folder:
        _write_weights(source, shards, folder)
        tokenizer = write_tokenizer(
            source.tokenizer, source.tokenizer_copies, folder.path, max_length=source.sizes.seq_length
        )
        dtype = shards[0][0].dtype
        _write_configuration(source, dtype, tokenizer.eos, folder.path)
        notes = [tokenizer.notice] if tokenizer.notice else []
        for note in notes:
            print(note, flush=True)
        notes += _rounding(source, options.dtype) + [_verify(source, folder.path, options)]
        parameters = sum(group.nbytes() // group.dtype.itemsize for shard in shards for group in shard)
        card = model_card(
            source.exo, source.sizes, str(dtype).removeprefix("torch."), parameters, source.come_from, notes
        )
        (folder.path / "README.md").write_text(card, encoding="utf-8")
    print(
        f"wrote {out}: {len(shards)} file{'s' if len(shards) > 1 else ''} of weights, {parameters:,} parameters",
        flush=True,
    )
    if options.push_to is not None:
        print(f"pushed to {hub.push(out, options.push_to)}", flush=True)


def groups_of(source: Source, dtype: torch.dtype | None) -> list[Group]:
    """Every row of the table with its dtype in the file, once names and shapes have been held against the source.

    Raises:
        ConversionError: a tensor is missing, unexpected, or of a wrong shape or dtype: which.
    """
    tensors, sizes = source.tensors, source.sizes
    count = sum(1 for _ in tensors)
    if sizes.num_layers > count:  # before a table of so many rows is made
        raise ConversionError(f"the checkpoint says it has {sizes.num_layers} layers, and has only {count} tensors")
    table = hf_mapping(source.exo, sizes)
    names = {row.ours for row in table}
    for kind, wrong in (("lacks", names - set(tensors)), ("has unexpected", set(tensors) - names)):
        if wrong:
            shown = ", ".join(sorted(wrong)[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
            raise ConversionError(f"the checkpoint {kind} {shown}")
    for row in table:
        _check_shape(row, tensors.shape(row.ours))
        if tensors.dtype(row.ours) not in DTYPE_NAMES:
            raise ConversionError(f"{row.ours} is of {tensors.dtype(row.ours)}, which is no dtype of weights here")
    return [Group(row, dtype or tensors.dtype(row.ours)) for row in table]


def _check_shape(row: ParameterMapping, shape: tuple[int, ...]) -> None:
    expected = row.our_shape()
    is_padded = row.ours in VOCABULARY and shape[1:] == expected[1:] and shape[:1] >= expected[:1]
    if shape != expected and not is_padded:
        raise ConversionError(f"{row.ours} has shape {list(shape)}, expected {list(expected)}")


def _write_weights(source: Source, shards: list[list[Group]], folder: UnfinishedFolder) -> None:
    def read(name: str) -> Tensor:
        tensor = source.tensors.read(name)
        return tensor[: source.sizes.vocab_size] if name in VOCABULARY else tensor

    names = [shard_name(number, len(shards)) for number in range(len(shards))]
    missing = {name: shard for name, shard in zip(names, shards, strict=True) if not folder.has(name)}
    if len(missing) < len(shards):
        print(f"going on with {folder.path}: {len(shards) - len(missing)} of {len(shards)} files are there", flush=True)
    progress = Progress("weights", sum(group.nbytes() for shard in missing.values() for group in shard))
    for name, shard in missing.items():
        folder.finish(name, write_shard(folder.path / name, shard, read, progress))
    progress.finish()
    write_index(folder.path, shards)


def _write_configuration(source: Source, dtype: torch.dtype, eos: int | None, folder: Path) -> None:
    from transformers import GenerationConfig

    from megatron_exo.hf import ExoFormerConfig
    from megatron_exo.hf.export import write_code_and_config

    fields = hf_config(source.exo, source.sizes)
    write_code_and_config(ExoFormerConfig(**fields, dtype=dtype, eos_token_id=eos), folder)
    GenerationConfig(eos_token_id=eos, pad_token_id=eos).save_pretrained(folder)


def _verify(source: Source, folder: Path, options: Options) -> str:
    if not options.verify:
        return "Not verified (`--no-verify`)."
    rounded_to = options.dtype if _rounded(source.tensors, options.dtype) else None
    comparison = verification.verify(folder, source.exo, source.sizes, source.load, rounded_to=rounded_to)
    print(f"verified: {comparison.line()}", flush=True)
    if comparison.largest_logit == 0.0:
        print("all logits are zero, as before the first step: this says nothing", flush=True)
    return f"Held against Megatron on random tokens, both in float32: {comparison.line()}."


def _rounding(source: Source, dtype: torch.dtype | None) -> list[str]:
    rounded = _rounded(source.tensors, dtype)
    return [f"{len(rounded)} tensors were rounded to {str(dtype).removeprefix('torch.')}."] if rounded else []


def _rounded(tensors: Tensors, dtype: torch.dtype | None) -> list[str]:
    """The tensors whose values the dtype cannot hold exactly."""
    if dtype is None or dtype is torch.float32:
        return []
    return [name for name in tensors if tensors.dtype(name) is not dtype]


def _check_room(out: Path, needed: int) -> None:
    parent = next(folder for folder in out.absolute().parents if folder.is_dir())
    partial = out.with_name(out.name + ".partial")
    there = sum(file.stat().st_size for file in partial.glob("*.safetensors")) if partial.is_dir() else 0
    free = shutil.disk_usage(parent).free + there
    if free < needed:
        raise UserError(
            f"{out} needs {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free; make room, or write elsewhere"
        )


def _digest(value: Iterable[Any]) -> str:
    return hashlib.sha256(json.dumps(list(value)).encode()).hexdigest()
