"""Installed packages with which training cannot work on this machine, found before Megatron imports them."""

from __future__ import annotations

import importlib.util
import sys

from megatron_exo.errors import UserError

_CUDA_KERNELS = {"transformer_engine_torch": "Transformer Engine", "amp_C": "NVIDIA Apex"}
"""Compiled module → the package that megatron-core takes for usable wherever that module can be imported."""
_REMEDY = "uninstall it or use an environment without it; python -m megatron_exo.doctor says how"


def refuse_conflicting_packages(on_gpu: bool) -> None:
    """Check, without an import, the packages that megatron-core picks up by itself.

    Raises:
        UserError: one of them runs on CUDA alone and models live on the CPU, or is installed in part.
    """
    if _is_installed("transformer_engine") and not _is_installed("transformer_engine_torch"):
        raise UserError(f"Transformer Engine is installed in part, which breaks the import of megatron-core; {_REMEDY}")
    for module, package in _CUDA_KERNELS.items():
        # A module that is there and cannot be found on disk is a stand-in: it has no kernels to be taken for usable.
        if not on_gpu and _spec_exists(module):
            raise UserError(
                f"{package} is installed and models live on the CPU here: megatron-core would run its CUDA kernels on "
                f"them; {_REMEDY}"
            )


def _is_installed(module: str) -> bool:
    return module in sys.modules or _spec_exists(module)


def _spec_exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # in sys.modules, but not from a finder
        return False
