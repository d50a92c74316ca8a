"""Which device Megatron runs on, and what has to be changed for that: the one home of this question.

``megatron.core`` and ``megatron.training`` assume CUDA. :func:`activate`, called once at program start before
any model is built, makes the unmodified packages run on CPU tensors and gloo where there is no CUDA, and does
next to nothing where there is. Nothing happens on import. Every change is a :class:`~.registry.Patch` with its
dotted target and its reason, and :func:`deactivate` takes all of them back.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator

import torch
from torch.utils._device import _device_constructors

from megatron_exo.platform.conflicts import refuse_conflicting_packages
from megatron_exo.platform.registry import Patch, PatchRegistry

__all__ = ["Patch", "activate", "active_patches", "communication_backend", "deactivate", "device", "is_gpu"]

_registry = PatchRegistry()
_true_cuda_available = torch.cuda.is_available


def is_gpu() -> bool:
    """Whether models live on CUDA devices. ``MEGATRON_EXO_DEVICE=cpu`` keeps a GPU machine on the CPU path."""
    return os.environ.get("MEGATRON_EXO_DEVICE", "") != "cpu" and _true_cuda_available()


def device() -> torch.device:
    """The device of this process's parameters and activations."""
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu() else torch.device("cpu")


def communication_backend() -> str:
    """The torch.distributed backend: ``nccl`` on GPUs, ``gloo`` on CPUs."""
    return "nccl" if is_gpu() else "gloo"


def activate() -> None:
    """Apply every patch that this machine needs. Calling it again does nothing.

    Raises:
        UserError: a package is installed with which Megatron cannot work here; nothing has been changed.
    """
    if _registry.applied:
        return
    refuse_conflicting_packages(is_gpu())
    # Megatron demands this variable for tensor parallelism even where no device reads it.
    _registry.set_default_environ("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # PyTorch loads the objects of a checkpoint with weights_only=False, which runs what they name; this overrules it.
    _registry.set_default_environ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    if not is_gpu():
        # megatron.core wraps small functions in torch.compile at its import, which is seconds quicker with this.
        _registry.set_default_environ("TORCHDYNAMO_DISABLE", "1")
    with warnings.catch_warnings():
        # Megatron says a dozen times that Transformer Engine and Apex are absent; `megatron_exo.doctor` says it once.
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|transformer-engine)")
        # PyTorch says that there is no CUDA runtime, as a warning or in its log; so does the line with the device.
        warnings.filterwarnings("ignore", message=".*No CUDA runtime is found")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        # PyTorch lists the functions that `with torch.device(...)` redirects when it first needs them. Made after our
        # patches, the list would lack its own functions, which ours call: models built on the meta device would not be.
        _device_constructors()
        _registry.apply(_needed_patches())


def _needed_patches() -> Iterator[Patch]:
    """The patches for this machine; lazily, so that a failing import of Megatron is undone like a failing patch."""
    from megatron_exo.platform.patches import PATCHES

    needed = {"always"}
    if not is_gpu():
        needed |= {"cpu", "without-fused-adam"}
    elif importlib.import_module("megatron.core.optimizer").USING_PYTORCH_OPTIMIZER:
        needed.add("without-fused-adam")
    yield from (patch for patch in PATCHES if patch.when in needed)


def deactivate() -> None:
    """Restore everything that :func:`activate` changed, in reverse order."""
    _registry.restore()


def active_patches() -> tuple[Patch, ...]:
    """The patches in force, in the order in which they were applied."""
    return tuple(_registry.applied)
