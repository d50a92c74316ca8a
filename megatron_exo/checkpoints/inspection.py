"""What a person sees of a checkpoint, and how two of them differ; for ``tools/inspect_checkpoint.py``."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_exo.checkpoints.integrity import damages, read_manifest
from megatron_exo.checkpoints.manifest import describe, plain
from megatron_exo.checkpoints.reading import (
    TRACKER,
    CheckpointError,
    DamagedCheckpointError,
    folder_named_in,
    folder_of,
    read_index,
    read_saved_arguments,
    read_shared_state,
    steps_of,
)
from megatron_exo.checkpoints.tensors import read_tensor
from megatron_exo.config import ExoConfig
from megatron_exo.errors import UserError, reason

_BLOCK = 1 << 22
"""Elements that are compared at once, in double precision."""
_WIDTH = 116


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path means: a folder ``iter_NNNNNNN`` itself, or the one a run's tracker names.

    Raises:
        CheckpointError: there is none.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; give that of a run, or an iter_N in it")
    if re.fullmatch(r"iter_\d+|release", path.name) or (path / ".metadata").exists():
        return path
    try:
        folder = folder_named_in(path / TRACKER)
    except FileNotFoundError:
        there = ", ".join(map(str, steps_of(path))) or "none"
        raise CheckpointError(f"{path} has no {TRACKER}; give a folder iter_N in it (iterations: {there})") from None
    if not folder.is_dir():
        raise CheckpointError(f"{path / TRACKER} names {folder.name}, which is not there; give a folder iter_N in it")
    return folder


def read_description(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; without one, what it says of itself otherwise.

    Raises:
        CheckpointError: it is damaged, or not an ExoFormer's.
    """
    if (manifest := read_manifest(folder)) is not None:
        return manifest
    index = read_index(folder)
    args = read_saved_arguments(folder, index)
    with described_as_here(folder):
        return describe(args, read_shared_state(folder, index)["iteration"], index)


@contextmanager
def described_as_here(folder: Path) -> Iterator[None]:
    """Around what reads a description: any error is that of a checkpoint that describes itself in another way.

    Raises:
        DamagedCheckpointError: for whatever the body raises but a ``UserError``.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever a field that is missing, or of another type, leads to
        raise DamagedCheckpointError(
            f"{folder} does not describe itself as this program's checkpoints do: {reason(error)}; copy it again"
        ) from error


def describe_run(root: Path, *, checksums: bool) -> dict[int, list[str]]:
    """Iteration → what is wrong with its checkpoint, for all that a run's folder holds."""
    return {step: damages(folder_of(root, step), checksums=checksums) for step in steps_of(root)}


def format_description(folder: Path, described: Mapping[str, Any]) -> str:
    """Lines for a person, of a label and a text each.

    Raises:
        DamagedCheckpointError: a field of the description is missing, or not what it is in ours.
    """
    with described_as_here(folder):
        return _format_description(folder, described)


def _format_description(folder: Path, described: Mapping[str, Any]) -> str:
    model, layout, tensors = described["model"], described["layout"], described["tensors"]
    exo = ExoConfig(**model["exo"])
    step, samples, tokens = (described[name] for name in ("step", "consumed_samples", "consumed_tokens"))
    lines = {
        "checkpoint": f"{folder}: iteration {step:,}, {samples:,} samples, {tokens:,} tokens",
        "saved": described.get("created", "no manifest: made by an earlier version, or elsewhere"),
        "variant": f"{model['variant'] or 'one without a name'}: {exo.describe()}",
        "model": (
            f"{model['num_layers']} layers, hidden size {model['hidden_size']}, {model['num_attention_heads']} heads "
            f"of {model['kv_channels']} in {model['num_query_groups']} groups, FFN {model['ffn_hidden_size']}, "
            f"vocabulary {model['vocab_size']} (padded to {model['padded_vocab_size']}), embeddings "
            f"{'tied' if model['tied_embeddings'] else 'not tied'}, {model['position_embedding_type']} base "
            f"{model['rotary_base']}, {model['dtype']}"
        ),
        "tensors": f"{tensors['count']}, {_bytes(tensors['bytes'])}",
        "layout": ", ".join(f"{_readable(name)} {value}" for name, value in layout.items() if value is not None),
    }
    if "files" in described:
        sizes = [record["bytes"] for record in described["files"].values()]
        lines["files"] = f"{len(sizes)}, {_bytes(sum(sizes))}"
        lines["tokenizer"] = _format_tokenizer(described["tokenizer"])
        lines["data"] = _format_data(described["data"])
        lines["versions"] = ", ".join(f"{name} {version}" for name, version in described["versions"].items())
        lines["command"] = " ".join(described["command"])
    return "\n".join(
        textwrap.fill(text, _WIDTH, initial_indent=f"{label:<12}", subsequent_indent=" " * 12, break_on_hyphens=False)
        for label, text in lines.items()
    )


def _readable(name: str) -> str:
    return name.replace("_model_parallel_size", "").replace("_parallel_size", "").replace("_", " ")


def _format_tokenizer(tokenizer: Mapping[str, Any]) -> str:
    files = [
        f"{name} (sha256 {record['sha256'][:12]}…, {'copied' if record['copied'] else 'too large for a copy'})"
        for name, record in tokenizer["files"].items()
    ]
    return ", ".join([tokenizer["type"], *([tokenizer["model"]] if tokenizer["model"] and not files else []), *files])


def _format_data(data: Mapping[str, Any]) -> str:
    if data["mock"]:
        return f"mock data, seed {data['seed']}"
    sets = [
        f"{each['part']} {each['prefix']}"
        + ("" if each["weight"] is None else f" (weight {each['weight']:g})")
        + ("" if each["bin_bytes"] is None else f" {_bytes(each['bin_bytes'])}")
        for each in data["sets"]
    ]
    return ", ".join([*(sets or [data.get("unreadable", "none")]), f"split {data['split']}", f"seed {data['seed']}"])


def _bytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


# -- differences ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorDifference:
    """Of one tensor with the same name, shape and dtype in both; ``relative`` is ‖a - b‖ / ‖a‖."""

    name: str
    largest: float
    relative: float


@dataclass
class Difference:
    """How two checkpoints differ; everything is empty for two that hold the same."""

    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Dotted name → both values, of the description and of the shared state (optimizer groups, schedule)."""
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    reshaped: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Name → both shapes and dtypes, where those differ."""
    values: list[TensorDifference] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    """Other objects whose bytes differ, such as generators' states."""
    equal: int = 0
    """How many tensors are equal, bit for bit."""

    def tensors_differ(self) -> bool:
        return bool(self.only_first or self.only_second or self.reshaped or self.values)


def compare(first: Path, second: Path) -> Difference:
    """Compare two checkpoints, whatever layouts they were saved from, with memory for one tensor of each at a time.

    Raises:
        CheckpointError: one of them is damaged, or not an ExoFormer's.
    """
    readers = [_Reader(folder) for folder in (first, second)]
    kinds = [reader.index.state_dict_metadata for reader in readers]
    difference = Difference(settings=dict(_changed(*(_settings(reader) for reader in readers))))
    difference.only_first = [name for name in kinds[0] if name not in kinds[1]]
    difference.only_second = [name for name in kinds[1] if name not in kinds[0]]
    for name in (name for name in kinds[0] if name in kinds[1]):
        metadata = [kind[name] for kind in kinds]
        shapes = [_shape(each) for each in metadata]
        if shapes[0] != shapes[1]:
            difference.reshaped[name] = (shapes[0], shapes[1])
        elif not isinstance(metadata[0], TensorStorageMetadata):
            if not name.startswith("common_state") and readers[0].read_bytes(name) != readers[1].read_bytes(name):
                difference.objects.append(name)
        elif (found := _compare(name, *(reader.read_tensor(name) for reader in readers))) is not None:
            difference.values.append(found)
        else:
            difference.equal += 1
    return difference


class _Reader:
    """What a checkpoint holds, read as data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_index(folder)
        self._places: dict[str, list[Any]] = {}
        for key, place in (self.index.storage_data or {}).items():
            self._places.setdefault(key.fqn, []).append(place)

    def read_tensor(self, name: str) -> Tensor:
        return read_tensor(self.folder, self.index, name)

    def read_bytes(self, name: str) -> list[bytes]:
        """What is stored under the name of an object."""
        contents = []
        for place in self._places.get(name, []):
            with (self.folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                contents.append(file.read(place.length))
        return contents


def _settings(reader: _Reader) -> dict[str, Any]:
    described = read_description(reader.folder)
    for name in ("files", "created", "command", "format", "format_version"):
        described.pop(name, None)
    shared = read_shared_state(reader.folder, reader.index)
    shared.pop("args", None)
    return dict(_flat("", described | {"shared state": shared}))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    items = (
        value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else None
    )
    if items is None:
        yield name, value.tolist() if isinstance(value, Tensor) else plain(value)
    else:
        for key, each in items:
            yield from _flat(f"{name}.{key}" if name else str(key), each)


def _changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name in [*first, *(name for name in second if name not in first)]:
        values = first.get(name), second.get(name)
        if values[0] != values[1]:
            yield name, values


def _shape(metadata: Any) -> str:
    if not isinstance(metadata, TensorStorageMetadata):
        return "object"
    return f"{str(metadata.properties.dtype).removeprefix('torch.')} {list(metadata.size)}"


def _compare(name: str, first: Tensor, second: Tensor) -> TensorDifference | None:
    """``None`` for two tensors with the same bits."""
    ours, theirs = first.flatten(), second.flatten()
    if torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)):
        return None
    largest, squares, reference = 0.0, 0.0, 0.0
    for a, b in zip(ours.split(_BLOCK), theirs.split(_BLOCK), strict=True):
        a, b = a.double(), b.double()
        largest = max(largest, (a - b).abs().max().item())
        squares += (a - b).square().sum().item()
        reference += a.square().sum().item()
    return TensorDifference(name, largest, (squares / reference) ** 0.5 if reference else float("inf"))


def format_difference(difference: Difference) -> str:
    """Lines for a person: settings first, then tensors."""
    lines = [f"{name}: {first!r} | {second!r}" for name, (first, second) in difference.settings.items()]
    lines += [f"only in the first: {name}" for name in difference.only_first]
    lines += [f"only in the second: {name}" for name in difference.only_second]
    lines += [f"{name}: {first} | {second}" for name, (first, second) in difference.reshaped.items()]
    lines += [
        f"{each.name}: differs by {each.largest:.3g} at most, {each.relative:.3g} of its norm"
        for each in difference.values
    ]
    lines += [f"{name}: other bytes" for name in difference.objects]
    count = len(difference.values) + len(difference.reshaped)
    return "\n".join([*lines, f"{difference.equal} tensors are equal bit for bit, {count} differ"])
