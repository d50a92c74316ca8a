"""Optimizer state that the distributed optimizer and the ordinary ones can take over from each other.

Both save whole tensors by the names of the model's parameters, and Megatron itself loads neither as the other: the main
weights have another name, or are not there where the model's own are as precise; what is no tensor lies one level
deeper; and a checkpoint of an ordinary optimizer does not say how state is sharded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.msc_utils import MultiStorageClientFeature
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_exo.checkpoints.reading import read_index

_MAIN_WEIGHTS = ("optimizer.state.param.", "optimizer.state.fp32_param.")
"""What the distributed optimizer, and Megatron's mixed-precision optimizer, put before a parameter's name."""

_SHARDING = "param_state_sharding_type"
"""What only the distributed optimizer says of its state."""


def as_fully_reshardable(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``load_content_metadata``: a checkpoint without a word on sharding holds whole tensors."""

    @functools.wraps(original)
    def load_content_metadata(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        metadata = original(*args, **kwargs)
        run = get_args()
        is_distributed = run.use_distributed_optimizer or run.use_layer_wise_distributed_optimizer
        if metadata is not None and is_distributed:
            metadata.setdefault("distrib_optim_sharding_type", "fully_reshardable")
            metadata.setdefault("distrib_optim_fully_reshardable_mem_efficient", False)
        return metadata

    return load_content_metadata


def by_the_names_there_are(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dist_checkpointing.load``: look for main weights under the names that the checkpoint has for them, and put
    the rest where this run's optimizer looks for it."""

    @functools.wraps(original)
    def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = [
            value
            for value in nested_values(sharded_state_dict)
            if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.key.startswith(_MAIN_WEIGHTS)
        ]
        if wanted and not MultiStorageClientFeature.is_enabled():
            tensors = {
                name: stored.properties.dtype
                for name, stored in read_index(Path(checkpoint_dir)).state_dict_metadata.items()
                if isinstance(stored, TensorStorageMetadata)
            }
            for value in wanted:
                value.key = _name_in(tensors, value.key)
            if any(not value.key.startswith(_MAIN_WEIGHTS) for value in wanted):
                kwargs["validate_access_integrity"] = False  # the model's own weights are then read twice
        optimizer = sharded_state_dict.get("optimizer")
        wanted_keys = {at: set(each) for at, each in _single(optimizer)} if isinstance(optimizer, dict) else {}
        loaded = original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
        if wanted_keys:
            state = loaded if isinstance(loaded, dict) else loaded[0]  # with what was missing behind it
            for at, each in _single(state["optimizer"]):
                if at in wanted_keys:
                    _arrange(each, wanted_keys[at])
        return loaded

    return load


def _single(state: dict[Any, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """The states of single optimizers by their places in a chain, such as Muon's and Adam's; ``None`` for one alone."""
    return list(state.items()) if all(isinstance(at, int) for at in state) else [(None, state)]


def _arrange(state: dict[str, Any], wanted: Collection[str]) -> None:
    """Put what is no tensor where the optimizer that asked for the keys ``wanted`` looks for it."""
    if _SHARDING in wanted:
        if "param_groups" in state:
            state["optimizer"] = {"param_groups": state.pop("param_groups")}
        state.setdefault(_SHARDING, "fully_reshardable")
    elif "param_groups" in wanted and "optimizer" in state:
        for group, saved in zip(state["param_groups"], state.pop("optimizer")["param_groups"], strict=True):
            group.update(saved)


def _name_in(tensors: Mapping[str, torch.dtype], name: str) -> str:
    """The name under which a checkpoint holds a main weight; if it holds none, the same one, which Megatron reports."""
    parameter = next(name.removeprefix(prefix) for prefix in _MAIN_WEIGHTS if name.startswith(prefix))
    others: Collection[str] = [prefix + parameter for prefix in _MAIN_WEIGHTS]
    is_precise = tensors.get(parameter) == torch.float32
    return next((each for each in [name, *others, *([parameter] if is_precise else [])] if each in tensors), name)
