"""The platform changes what it must, only when it is activated, and takes everything back."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import megatron.core.optimizer
import megatron.training.training
import pytest
import torch

from megatron_exo import platform
from megatron_exo.platform.patches import PATCHES


def _held(target: str) -> Any:
    """What the owner of a target holds itself, ``None`` for what a class inherits."""
    owner, name = next(patch for patch in PATCHES if patch.target == target).owner_and_name()
    return vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name)


def test_importing_the_platform_changes_nothing_and_imports_no_megatron() -> None:
    program = """
import os, sys, torch
def state():
    return dict(os.environ), dict(vars(torch)), dict(vars(torch.cuda)), dict(vars(torch.Tensor))
before = state()
import megatron_exo, megatron_exo.platform
assert all(a.keys() == b.keys() and all(a[k] is b[k] for k in a) for a, b in zip(before[1:], state()[1:]))
assert state()[0] == before[0] and not any(name.startswith("megatron.") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_activating_twice_is_activating_once(active_platform: None) -> None:
    once = {patch.target: _held(patch.target) for patch in PATCHES}
    count = len(platform.active_patches())
    platform.activate()
    assert len(platform.active_patches()) == count == len(PATCHES)
    assert all(_held(target) is held for target, held in once.items())


def test_deactivating_gives_every_target_and_variable_back_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCHDYNAMO_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    before = {patch.target: _held(patch.target) for patch in PATCHES}
    environ = dict(os.environ)
    for _ in range(2):
        platform.activate()
        assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == os.environ["TORCHDYNAMO_DISABLE"] == "1"
        assert torch.zeros is not before["torch:zeros"]
        platform.deactivate()
        assert all(_held(target) is held for target, held in before.items())
        assert dict(os.environ) == environ
        assert platform.active_patches() == ()


def test_a_failing_patch_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(megatron.training.training, "set_jit_fusion_options")
    zeros, environ = torch.zeros, dict(os.environ)
    with pytest.raises(AttributeError, match="set_jit_fusion_options"):
        platform.activate()
    assert torch.zeros is zeros
    assert dict(os.environ) == environ
    assert platform.active_patches() == ()


@pytest.mark.parametrize("has_fused_adam", [True, False])
def test_on_a_gpu_only_what_is_missing_there_is_patched(has_fused_adam: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_EXO_DEVICE")
    monkeypatch.setattr(platform, "_true_cuda_available", lambda: True)
    monkeypatch.setattr(megatron.core.optimizer, "USING_PYTORCH_OPTIMIZER", not has_fused_adam)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    platform.activate()
    kinds = {patch.when for patch in platform.active_patches()}
    assert kinds == ({"always"} if has_fused_adam else {"always", "without-fused-adam"})
    assert "TORCHDYNAMO_DISABLE" not in os.environ
    assert platform.communication_backend() == "nccl"


def test_a_machine_kept_on_the_cpu_says_so(active_platform: None) -> None:
    assert not platform.is_gpu()
    assert platform.device() == torch.device("cpu")
    assert platform.communication_backend() == "gloo"


def test_models_are_still_built_on_the_meta_device() -> None:
    """transformers builds them there, and takes buffers that are not for initialised; in a process of its own, since
    PyTorch lists what it redirects once in a process."""
    program = """
import torch
from megatron_exo import platform
platform.activate()
with torch.device("meta"):
    made = [torch.zeros(2), torch.empty(2), torch.tensor([1.0]), torch.arange(2), torch.nn.Linear(2, 2).weight]
assert {tensor.device.type for tensor in made} == {"meta"}, made
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
