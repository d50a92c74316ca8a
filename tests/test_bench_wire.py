"""tools/bench_wire.py: what it counts is right, and its table has every wire."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools/bench_wire.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_wire", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_wire"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_bytes_kept_for_the_backward_pass_are_counted_once_and_without_parameters(bench: ModuleType) -> None:
    linear = torch.nn.Linear(8, 8, bias=False)
    kept = bench.KeptBytes(SimpleNamespace(chunks=[linear]))
    with kept.counting():
        hidden = linear(torch.ones(4, 8)).exp()  # keeps its input (128 bytes) and its result (128)
        output = (hidden * hidden[:2].sum()).sum()  # the result again, and a scalar
    assert kept.peak == 4 * (4 * 8 + 4 * 8 + 1)
    output.backward()
    del hidden, output
    assert kept.now == 0


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    small = (
        "--hidden-size 32 --num-attention-heads 4 --query-groups 1 --num-layers 4 --seq-length 16 --rounds 1".split()
    )
    return subprocess.run(
        [sys.executable, str(TOOL), *small, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_every_wire_is_measured_for_both_kinds_of_heads(tmp_path: Path, virtual_stages: int) -> None:
    done = _bench("--virtual-stages", str(virtual_stages), "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    widths = {(row["heads"], row["wire"]): row["times_hidden"] for row in rows}
    expected = {("multi-head", "anchors"): 5.0, ("grouped queries", "anchors"): 3.5}
    expected |= {(heads, "no anchor"): 1.0 for heads in ("multi-head", "grouped queries")}
    if virtual_stages == 1:
        expected |= {(heads, "source"): 2.0 for heads in ("multi-head", "grouped queries")}
    assert widths == expected
    by_wire = {(row["heads"], row["wire"]): row for row in rows}
    anchors, none = (by_wire["multi-head", wire] for wire in ("anchors", "no anchor"))
    assert anchors["boundary_bytes"] == 16 * 5 * 32 * 4
    assert anchors["kept_last_stage"] > none["kept_last_stage"] > 0
    assert f"| multi-head | anchors | {16 * 5 * 32 * 4 / 1024:.0f} | 5.00 |" in done.stdout


def test_one_stage_has_no_boundary() -> None:
    done = _bench("--pp", "1")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith("no boundary to measure; pass --pp 2 or more")
