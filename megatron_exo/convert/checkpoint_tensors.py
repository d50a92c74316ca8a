"""The model's tensors in a ``torch_dist`` checkpoint of any layout, one whole tensor at a time, and what model it is.

Megatron gives a tensor one key whatever ranks saved it, and lists the chunks that they wrote; a layer has its number
over all pipeline stages in the key. So one process can put each tensor together without building a model.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from megatron_exo.checkpoints.reading import DamagedCheckpointError, read_index
from megatron_exo.config import ExoConfig
from megatron_exo.convert.mapping import ConversionError, ModelSizes
from megatron_exo.plain_pickle import check_saved, check_tensor, reason
from megatron_exo.shards import LAYER, unfused

_PARTS_OF_A_MODEL = ("embedding.", "decoder.", "output_layer.")
_SIZES = {
    # in the manifest: in ModelSizes
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_query_groups",
    "kv_channels": "kv_channels",
    "ffn_hidden_size": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "rotary_base": "rotary_base",
    "layernorm_epsilon": "layernorm_epsilon",
    "tied_embeddings": "tied",
}
_ONLY_VALUES: dict[str, Any] = {
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "swiglu": True,
    "qk_layernorm": True,
    "qk_l2_norm": False,
    "softmax_type": "vanilla",
    "window_size": None,
}
"""Arguments of a run that change what the weights compute → the one value that conversion and generation know."""


class CheckpointTensors:
    """The parameters of a checkpoint by our names, whatever else it holds.

    Args:
        folder: ``iter_NNNNNNN``.

    Raises:
        DamagedCheckpointError: the index or one of its files is missing, cut off or not what it should be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = read_index(folder)
        self._stored = {
            _our_name(key): (key, kind)
            for key, kind in self._index.state_dict_metadata.items()
            if isinstance(kind, TensorStorageMetadata) and key.startswith(_PARTS_OF_A_MODEL)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        """As stored: the rows of a vocabulary with their padding."""
        return tuple(self._stored[name][1].size)

    def dtype(self, name: str) -> torch.dtype:
        return self._stored[name][1].properties.dtype

    def read(self, name: str) -> Tensor:
        """The whole tensor, on the CPU, in memory of its own; at most one chunk is in memory beside it.

        Raises:
            DamagedCheckpointError: its chunks do not make up the tensor, or one cannot be read; names the tensor.
        """
        key, kind = self._stored[name]
        try:
            _check_chunks(kind)
            chunks = [self._read_chunk(key, kind, chunk) for chunk in kind.chunks[:1]]
            if len(kind.chunks) == 1:
                return chunks[0]
            whole = torch.empty(kind.size, dtype=kind.properties.dtype)
            for chunk in kind.chunks:
                part = chunks.pop() if chunks else self._read_chunk(key, kind, chunk)
                place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
                whole[place] = part
                del part  # before the next is read
            return whole
        except Exception as error:  # damaged bytes raise whatever they like
            raise DamagedCheckpointError(f"{self._folder}: {name} cannot be read: {reason(error)}") from error

    def _read_chunk(self, key: str, kind: TensorStorageMetadata, chunk: ChunkStorageMetadata) -> Tensor:
        place = self._index.storage_data[MetadataIndex(key, chunk.offsets)]
        size = math.prod(chunk.sizes) * kind.properties.dtype.itemsize
        if size > place.length or place.transform_descriptors:
            raise ValueError(f"a chunk of {size} bytes is stored in {place.length}, or in another way than plainly")
        with (self._folder / place.relative_path).open("rb") as file:
            section = cast(BinaryIO, _Section(file, place.offset, place.length))
            check_saved(section)
            part = torch.load(section, map_location="cpu", weights_only=True)
        if not isinstance(part, Tensor):
            raise ValueError(f"a chunk is a {type(part).__name__}")
        check_tensor(part)
        if part.shape != chunk.sizes or part.dtype != kind.properties.dtype:
            raise ValueError(f"a chunk is {part.dtype} {list(part.shape)}, not as the index says")
        return part


class _Section(io.RawIOBase):
    """A part of a file as a file of its own; reading it copies nothing but what is asked for."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._position))
        self._file.seek(self._start + self._position)
        count = self._file.readinto(view[:count])  # type: ignore[attr-defined]
        self._position += count
        return count


def _our_name(key: str) -> str:
    """Checkpoints keep the names of Transformer Engine's fused modules, whoever saved them."""
    layer = LAYER.match(key)
    return key if layer is None else layer[0] + unfused(key[layer.end() :])


def _check_chunks(kind: TensorStorageMetadata) -> None:
    """Refuse chunks that leave a part of the tensor out, or say a part twice."""
    boxes = [[(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in kind.chunks]
    if not all(len(box) == len(kind.size) for box in boxes):
        raise ValueError("chunks of another rank than the tensor")
    within = all(0 <= a <= b <= size for box in boxes for (a, b), size in zip(box, kind.size, strict=True))
    covered = sum(math.prod(chunk.sizes) for chunk in kind.chunks)
    overlap = any(
        all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))
        for number, one in enumerate(boxes)
        for other in boxes[:number]
    )
    if not within or overlap or covered != math.prod(kind.size):
        raise ValueError(f"its {len(boxes)} chunks do not make up a tensor of {list(kind.size)}")


def model_of(description: Mapping[str, Any]) -> tuple[ExoConfig, ModelSizes]:
    """The variant and the sizes that a checkpoint states.

    Args:
        description: of :func:`megatron_exo.checkpoints.inspection.read_description`.

    Raises:
        ConversionError: it does not state them, or computes something that our models do not.
    """
    try:
        model, arguments = description["model"], description["arguments"]
        for name, only in _ONLY_VALUES.items():
            value = model[name] if name in model else arguments.get(name, only)
            if value != only:
                raise ConversionError(
                    f"the checkpoint was trained with {name}={str(value)[:40]}; "
                    f"outside of training, only {only} is supported"
                )
        exo = ExoConfig(**model["exo"])
        sizes = ModelSizes(**{ours: _number(theirs, model[theirs]) for theirs, ours in _SIZES.items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"the checkpoint does not say what model it is of: {reason(error)}") from error
    check_sizes(sizes)
    return exo, sizes


def _number(name: str, value: Any) -> Any:
    if name == "rotary_base" and type(value) is int:
        return float(value)
    kind = {"rotary_base": float, "layernorm_epsilon": float, "tied_embeddings": bool}.get(name, int)
    if type(value) is not kind:
        raise TypeError(f"{name} is {str(value)[:40]}")
    return value


_LARGEST = 1 << 31


def check_sizes(sizes: ModelSizes) -> None:
    """Refuse sizes that no model has, before shapes are made of them.

    Raises:
        ConversionError: naming the size.
    """
    for name, value in vars(sizes).items():
        if name != "tied" and not 0 < value < _LARGEST:
            raise ConversionError(f"{name} is {value}, which is no size of a model")
    if sizes.num_attention_heads % sizes.num_query_groups:
        raise ConversionError(f"{sizes.num_attention_heads} heads cannot share {sizes.num_query_groups} query groups")
