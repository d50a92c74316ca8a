"""Run a program with Transformer Engine importable, but without its compiled libraries.

    python -m tests.te.stub MODULE [ARGUMENT…]

Its modules can then be constructed on any machine, and run on none. Nothing that is replaced takes part in building a
module: kernels, and packages used only for export, for inference and to validate recipes.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import os
import runpy
import sys
import types
import warnings
from unittest import mock

# Transformer Engine compares the names of these two with its own copies at import.
_ENUMS = {
    "DType": {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
    "NVTE_Fused_Attn_Backend": {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
}


class _AnyNames(types.ModuleType):
    """A module that has every name that is asked of it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, mock.MagicMock(name=f"{self.__name__}.{name}"))
        return getattr(self, name)


def install() -> None:
    """Make ``import transformer_engine.pytorch`` work; its wheel must be on the path, and not yet be imported."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its own switch for an import that loads no shared libraries
    extension = _AnyNames("transformer_engine_torch")
    for name, members in _ENUMS.items():
        setattr(extension, name, enum.IntEnum(name, members))
    pydantic = types.ModuleType("pydantic.dataclasses")
    pydantic.dataclass = dataclasses.dataclass  # type: ignore[attr-defined]
    for module in (
        extension,
        pydantic,
        _AnyNames("einops"),
        _AnyNames("transformer_engine.pytorch.onnx_extensions"),
    ):
        sys.modules[module.__name__] = module

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected a PyTorch installation")  # the extension is missing
        common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    importlib.import_module("transformer_engine.pytorch")


if __name__ == "__main__":
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
