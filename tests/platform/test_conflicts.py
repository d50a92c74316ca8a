"""Packages with which Megatron cannot train here are refused before anything is imported or changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_exo import platform
from megatron_exo.errors import UserError
from megatron_exo.platform.conflicts import refuse_conflicting_packages


def _install(folder: Path, *modules: str) -> None:
    """Packages that fail when imported, so that a test sees whether they were."""
    for module in modules:
        (folder / module).mkdir()
        (folder / module / "__init__.py").write_text("raise RuntimeError('imported')\n")


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            ["transformer_engine", "transformer_engine_torch"],
            "Transformer Engine is installed and models live on the CPU",
        ),
        (["amp_C"], "NVIDIA Apex is installed and models live on the CPU"),
        (["transformer_engine"], "Transformer Engine is installed in part"),
    ],
    ids=" ".join,
)
def test_a_package_with_cuda_kernels_is_refused_on_the_cpu(
    modules: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, *modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MEGATRON_EXO_DEVICE", "cpu")
    environ, zeros = dict(os.environ), torch.zeros
    with pytest.raises(UserError, match=message) as refused:
        platform.activate()
    assert "\n" not in str(refused.value)
    assert "megatron_exo.doctor" in str(refused.value)
    assert platform.active_patches() == ()
    assert dict(os.environ) == environ
    assert torch.zeros is zeros


def test_what_an_uninstall_left_over_is_refused_with_and_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformer_engine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for on_gpu in (False, True):
        with pytest.raises(UserError, match="installed in part"):
            refuse_conflicting_packages(on_gpu)


def test_complete_packages_are_accepted_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "transformer_engine", "transformer_engine_torch", "amp_C")
    monkeypatch.syspath_prepend(tmp_path)
    refuse_conflicting_packages(on_gpu=True)


def test_a_stand_in_for_the_kernels_is_no_reason_to_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "transformer_engine")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", ModuleType("transformer_engine_torch"))
    refuse_conflicting_packages(on_gpu=False)


def test_training_beside_transformer_engine_on_a_cpu_ends_with_one_line(tmp_path: Path) -> None:
    _install(tmp_path, "transformer_engine", "transformer_engine_torch")
    environ = os.environ | {"MEGATRON_EXO_DEVICE": "cpu", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "megatron_exo.pretrain", "--preset", "demo", "--mock-data"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: Transformer Engine is installed and models live on the CPU here")
