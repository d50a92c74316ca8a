"""Checkpoints of any content without training or ranks: tensors in files, an index that points to them, a manifest."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_exo.checkpoints.integrity import FORMAT_VERSION, MANIFEST, digest_of, sha256_of
from megatron_exo.config import ExoConfig
from megatron_exo.sizes import ModelSizes

FUSED = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}


def write_checkpoint(
    folder: Path, exo: ExoConfig, sizes: ModelSizes, state: Mapping[str, Tensor], *, parts: int = 1, padding: int = 0
) -> None:
    """Write ``state``, by our names, as Megatron does, with tensors cut into ``parts`` along their first axis where
    that divides, and ``padding`` rows after each vocabulary."""
    pieces: dict[str, Tensor] = {}
    tensors: dict[str, TensorStorageMetadata] = {}
    for name, tensor in state.items():
        if padding and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            tensor = torch.cat([tensor, tensor.new_full((padding, tensor.shape[1]), 7.0)])
        key = next((name.removesuffix(end) + fused for end, fused in FUSED.items() if name.endswith(end)), name)
        chunks = tensor.chunk(parts) if tensor.shape[0] % parts == 0 else [tensor]
        places, start = [], 0
        for number, chunk in enumerate(chunks):
            pieces[f"{key}#{number}"] = chunk
            offsets = torch.Size([start] + [0] * (tensor.dim() - 1))
            places.append(ChunkStorageMetadata(offsets=offsets, sizes=chunk.shape))
            start += chunk.shape[0]
        properties = TensorProperties(dtype=tensor.dtype)
        tensors[key] = TensorStorageMetadata(properties=properties, size=tensor.shape, chunks=places)
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(pieces, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    stored = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    by_piece = {key.fqn: place for key, place in stored.items()}
    places_of = {
        MetadataIndex(key, chunk.offsets): by_piece[f"{key}#{number}"]
        for key, kind in tensors.items()
        for number, chunk in enumerate(kind.chunks)
    }
    write_index(folder, Metadata(state_dict_metadata=dict(tensors), storage_data=places_of))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    write_manifest(folder, exo, sizes)


def read_index(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def write_index(folder: Path, index: Metadata) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def write_manifest(
    folder: Path,
    exo: ExoConfig,
    sizes: ModelSizes,
    model_changes: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> None:
    """Write or replace what the checkpoint says of itself, as far as a conversion reads it."""
    fields = dataclasses.asdict(sizes)
    model = {"exo": dataclasses.asdict(exo), "max_position_embeddings": fields.pop("seq_length"), **fields}
    model |= {"rotary_base": int(sizes.rotary_base), "position_embedding_type": "rope", "rotary_percent": 1.0}
    model |= {"rotary_interleaved": False, "normalization": "RMSNorm"}
    names = [file.name for file in sorted(folder.iterdir()) if file.is_file() and file.name != MANIFEST]
    content = {
        "format_version": FORMAT_VERSION,
        "step": 5,
        "consumed_tokens": 640,
        "model": model | dict(model_changes or {}),
        "arguments": {},
        "tokenizer": dict(tokenizer or {"type": "NullTokenizer", "files": {}}),
        "files": {n: {"bytes": (folder / n).stat().st_size, "sha256": sha256_of(folder / n)} for n in names},
    }
    (folder / MANIFEST).write_text(json.dumps({"sha256": digest_of(content), **content}))


def gigabytes(state: Mapping[str, Tensor]) -> float:
    return sum(math.prod(tensor.shape) * tensor.itemsize for tensor in state.values()) / 1e9
