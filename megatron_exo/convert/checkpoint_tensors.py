"""The model's tensors in a ``torch_dist`` checkpoint of any layout, one whole tensor at a time, and what model it is.

Megatron gives a tensor one key whatever ranks saved it, and lists the chunks that they wrote; a layer has its number
over all pipeline stages in the key. So one process can put each tensor together without building a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_exo.checkpoints.reading import read_index
from megatron_exo.checkpoints.tensors import read_tensor
from megatron_exo.config import ExoConfig
from megatron_exo.convert.mapping import ConversionError
from megatron_exo.errors import reason
from megatron_exo.shards import LAYER, unfused
from megatron_exo.sizes import ModelSizes

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
    "max_position_embeddings": "seq_length",
    "rotary_base": "rotary_base",
    "layernorm_epsilon": "layernorm_epsilon",
    "tied_embeddings": "tied_embeddings",
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
        return read_tensor(self._folder, self._index, self._stored[name][0])


def _our_name(key: str) -> str:
    """Checkpoints keep the names of Transformer Engine's fused modules, whoever saved them."""
    layer = LAYER.match(key)
    return key if layer is None else layer[0] + unfused(key[layer.end() :])


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
        if name != "tied_embeddings" and not 0 < value < _LARGEST:
            raise ConversionError(f"{name} is {str(value)[:40]}, which is no size of a model")
    if sizes.num_attention_heads % sizes.num_query_groups:
        raise ConversionError(f"{sizes.num_attention_heads} heads cannot share {sizes.num_query_groups} query groups")
