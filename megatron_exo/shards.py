"""Between whole tensors and the parts of them that the ranks of a layout hold.

Whole tensors go by the names of an unsharded model, layers numbered from 0 over all pipeline stages (the names of
:mod:`megatron_exo.convert.mapping`); parts are the parameters of this rank's model chunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_exo.convert.mapping import check_state

EMBEDDING = "embedding.word_embeddings.weight"
LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
"""How the name of a layer's parameter begins."""
_UNFUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norm weights inside Transformer Engine's fused modules → their names in an unfused layer."""


def unfused(name: str) -> str:
    """A parameter's name in an unfused layer, from its name within a layer of either backend, or in a checkpoint."""
    return _UNFUSED.get(name, name)


def named_shards(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of this rank's (possibly wrapped) chunks under their whole-model names.

    A copy, such as of the anchor on a later pipeline stage, has its original's name and ``shared`` set.
    """
    for chunk in unwrap_model(list(chunks)):
        layers = chunk.decoder.layers
        for name, parameter in chunk.named_parameters():
            match = LAYER.match(name)
            if match:
                rest = name[match.end() :]
                number = layers[int(match[1])].layer_number
                if rest.startswith("anchor."):
                    number = chunk.config.exo.source_layer
                name = f"decoder.layers.{number - 1}.{unfused(rest)}"
            yield name, parameter


def cut(name: str, whole: Tensor, shard: Tensor) -> Tensor:
    """The part of ``whole`` that belongs in ``shard``, of ``shard``'s shape; vocabulary padding is zero."""
    if not getattr(shard, "tensor_model_parallel", False):
        return whole
    dim = shard.partition_dim  # type: ignore[attr-defined]
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    padding = shard.shape[dim] * size - whole.shape[dim]
    if padding and _is_vocabulary(name):
        whole = torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])])
    return (
        _blocks(name, whole).chunk(size, dim=dim + 1)[rank].flatten(0, 1)
        if _is_swiglu(name)
        else whole.chunk(size, dim)[rank]
    )


def join_all(shards: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`cut` for many tensors, by one collective over the tensor-parallel group; padding is kept.

    Args:
        shards: name → parameter, for its attributes.
        values: name → what is to be joined, of the parameter's shape: itself, its gradient, an optimizer moment.

    Returns:
        Name → copy of the whole tensor, float32.
    """
    flat = torch.cat([value.detach().float().flatten() for value in values.values()])
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(ranks, flat, group=group)
    sizes = [value.numel() for value in values.values()]
    columns = zip(*(rank.split(sizes) for rank in ranks), strict=True)
    return {
        name: _join(name, [part.view(value.shape) for part in parts], shards[name])
        for (name, value), parts in zip(values.items(), columns, strict=True)
    }


def _join(name: str, parts: list[Tensor], shard: Tensor) -> Tensor:
    if not getattr(shard, "tensor_model_parallel", False):
        return parts[parallel_state.get_tensor_model_parallel_rank()].clone()
    dim = shard.partition_dim  # type: ignore[attr-defined]
    if _is_swiglu(name):
        return torch.cat([_blocks(name, part) for part in parts], dim=dim + 1).flatten(0, 1)
    return torch.cat(parts, dim)


@torch.no_grad()
def load_whole_state(chunks: Sequence[torch.nn.Module], state: Mapping[str, Tensor], *, pipeline_size: int) -> None:
    """Copy whole tensors into this rank's chunks, in the dtype of the parameters.

    Raises:
        ConversionError: a tensor that is missing, of a wrong shape or, where one stage holds everything, too much.
    """
    wanted = dict(named_shards(chunks))
    known = state if pipeline_size == 1 else {name: state[name] for name in wanted if name in state}
    rows = state[EMBEDDING].shape[0] if EMBEDDING in state else None  # the padding is ours
    check_state({name: whole_shape(name, shard, rows) for name, shard in wanted.items()}, known)
    for name, shard in wanted.items():
        shard.copy_(cut(name, state[name], shard))


def whole_shape(name: str, shard: Tensor, vocab_size: int | None = None) -> tuple[int, ...]:
    """The shape of the whole tensor that ``shard`` is a part of, with ``vocab_size`` rows where they are tokens."""
    shape = list(shard.shape)
    if getattr(shard, "tensor_model_parallel", False):
        dim = shard.partition_dim  # type: ignore[attr-defined]
        shape[dim] *= parallel_state.get_tensor_model_parallel_world_size()
    if _is_vocabulary(name) and vocab_size is not None:
        shape[0] = vocab_size
    return tuple(shape)


def _is_vocabulary(name: str) -> bool:
    return name in (EMBEDDING, "output_layer.weight")


def _is_swiglu(name: str) -> bool:
    """Whether each rank's rows are two blocks, its part of the gate and its part of the value branch."""
    return name.endswith("mlp.linear_fc1.weight")


def _blocks(name: str, tensor: Tensor) -> Tensor:
    return tensor.unflatten(0, (2, -1)) if _is_swiglu(name) else tensor
