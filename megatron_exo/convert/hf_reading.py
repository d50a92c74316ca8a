"""Reads a Hugging Face folder as data: its ``config.json`` and safetensors files, never code or pickles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_exo.config import ExoConfig
from megatron_exo.convert.checkpoint_tensors import check_sizes
from megatron_exo.convert.hugging_face import MODEL_TYPE, from_hf_config, hf_mapping
from megatron_exo.convert.mapping import ConversionError, ParameterMapping, check_state
from megatron_exo.convert.safetensors_writing import DTYPE_NAMES, INDEX
from megatron_exo.errors import reason
from megatron_exo.sizes import ModelSizes

_SINGLE = "model.safetensors"
_LARGEST_JSON = 100_000_000
"""Bytes; an index of a million tensors is smaller."""


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A model in a folder, checked as far as headers tell."""

    exo: ExoConfig
    sizes: ModelSizes
    state: Mapping[str, Tensor]
    """By our names; each tensor is read when it is asked for, and not kept."""
    dtypes: frozenset[torch.dtype]


def read_folder(folder: Path) -> HuggingFaceFolder:
    """Read configuration and headers, and hold every name, shape and dtype against what the model has.

    Raises:
        ConversionError: a file is missing, damaged or leads elsewhere, or a tensor is missing, unexpected or of a wrong
            shape or dtype: which.
        ExoConfigError: the configuration names no variant.
    """
    if not folder.is_dir():
        raise ConversionError(f"{folder} is no folder; give one with config.json and safetensors files")
    try:
        exo, sizes = from_hf_config(_read_json(folder / "config.json"))
        check_sizes(sizes)
    except ConversionError as error:
        raise ConversionError(f"{folder / 'config.json'}: {error}") from error
    places = _places(folder)
    if sizes.num_layers > len(places):  # before a table of so many rows is made
        raise ConversionError(
            f"{folder}: config.json has {sizes.num_layers} layers, the files only {len(places)} tensors"
        )
    headers = _headers(folder, places)
    table = hf_mapping(exo, sizes)
    expected = {n: s for row in table for n, s in zip(row.their_names, row.their_shapes(), strict=True)}
    try:
        check_state(expected, {name: torch.empty(shape, device="meta") for name, (shape, _) in headers.items()})
    except ConversionError as error:
        raise ConversionError(f"{folder}: {error}") from error
    return HuggingFaceFolder(
        exo,
        sizes,
        _FolderState(folder, places, {row.ours: row for row in table}),
        frozenset(dtype for _, dtype in headers.values()),
    )


def check_plain(folder: Path) -> bool:
    """Whether the model that ``config.json`` describes is an ExoFormer.

    Raises:
        ConversionError: the file cannot be read, or names an implementation of attention that is to be downloaded.
    """
    config = _read_json(folder / "config.json")
    for name in ("attn_implementation", "_attn_implementation"):
        if "/" in str(config.get(name)):  # a repository of the hub, with code
            raise ConversionError(f"{folder / 'config.json'}: {name} names code from elsewhere; remove it")
    return config.get("model_type") == MODEL_TYPE


class _FolderState(Mapping[str, Tensor]):
    def __init__(self, folder: Path, places: Mapping[str, str], rows: Mapping[str, ParameterMapping]) -> None:
        self._folder, self._places, self._rows = folder, places, rows

    def __getitem__(self, name: str) -> Tensor:
        row = self._rows[name]
        tensors = []
        for their_name in row.their_names:
            path = self._folder / self._places[their_name]
            try:
                with safe_open(path, framework="pt") as file:
                    tensors.append(file.get_tensor(their_name))
            except (SafetensorError, OSError) as error:
                raise ConversionError(f"{path}: {their_name} cannot be read: {reason(error)}") from error
        return row.to_ours(tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _places(folder: Path) -> dict[str, str]:
    """Tensor → the file in the folder that holds it."""
    if (folder / INDEX).exists():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConversionError(f"{folder / INDEX} has no weight_map")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ConversionError(
                    f"{folder / INDEX} puts {name[:80]} into {str(file)[:80]!r}, "
                    "which is no safetensors file of the folder"
                )
            _check_inside(folder, file)
        return weight_map
    if not (folder / _SINGLE).exists():
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        why = f"{pickles[0]} is a pickle, which can run code: save the model again as safetensors" if pickles else ""
        raise ConversionError(f"{folder} has neither {INDEX} nor {_SINGLE}; {why or 'give the folder of a model'}")
    _check_inside(folder, _SINGLE)
    return dict.fromkeys(_headers_of(folder / _SINGLE), _SINGLE)


def _check_inside(folder: Path, name: str) -> None:
    """Refuse a link to elsewhere, except into the blobs that the hub's library keeps beside its snapshots."""
    target, root = (folder / name).resolve(), folder.resolve()
    if not target.is_file():
        raise ConversionError(f"{folder / name} is missing")
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if target.parent not in (root, blobs):
        raise ConversionError(f"{folder / name} is a link to elsewhere; copy the file itself")


def _headers(folder: Path, places: Mapping[str, str]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Tensor → shape and dtype, of all that the files hold."""
    headers: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for file in sorted(set(places.values())):
        for name, header in _headers_of(folder / file).items():
            if places.get(name) != file:
                where = f"in {places[name]}" if name in places else "nowhere"
                raise ConversionError(f"{folder / file} holds {name[:80]}, which the index says is {where}")
            headers[name] = header
    if missing := sorted(places.keys() - headers.keys()):
        raise ConversionError(f"{folder / places[missing[0]]} lacks {missing[0][:80]}, which the index says is in it")
    return headers


def _headers_of(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    headers = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dict
                part = file.get_slice(name)
                if part.get_dtype() not in dtypes:
                    raise ConversionError(
                        f"{path}: {name[:80]} is of {part.get_dtype()}, which is no dtype of weights here"
                    )
                headers[name] = (tuple(part.get_shape()), dtypes[part.get_dtype()])
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path} is no safetensors file, or damaged: {reason(error)}") from error
    return headers


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_JSON + 1)
        if len(text) > _LARGEST_JSON:
            raise ConversionError(f"{path} is larger than {_LARGEST_JSON} bytes")
        content = json.loads(text)
    except FileNotFoundError:
        raise ConversionError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConversionError):
            raise
        raise ConversionError(f"{path} is no JSON: {reason(error)}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} is no JSON object")
    return content
