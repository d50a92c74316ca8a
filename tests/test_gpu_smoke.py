"""tools/gpu_smoke.py: it passes where results agree, fails where they do not, and one failure is one row."""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_exo.errors import one_line
from megatron_exo.smoke.cases import BOUNDS, DTYPES, STAGES, VARIANTS, Case, Deviation, Result
from megatron_exo.smoke.compare import (
    largest_difference,
    largest_relative_error,
    number_of_changed,
    relative_error,
)
from megatron_exo.smoke.process import Worker, WorkerError
from megatron_exo.smoke.report import COLUMNS, cells, failures, markdown, summary
from tests.ranks import run_on_ranks

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools/gpu_smoke.py"
CASE = Case("dynamic-e-exoformer", "local", "fp32", "small")
QUANTITIES = {
    "loss",
    "logits",
    "gradient",
    "gradient with documents masked",
    "loss while training",
    "parameters changed by save and load",
    "loss after resume",
}
WITHOUT_PACKAGES = """
from importlib.machinery import PathFinder

ABSENT = "einops matplotlib pyarrow sentencepiece tensorboard tokenizers transformers yaml zstandard".split()
find_spec = PathFinder.find_spec


@staticmethod
def without_them(name, *others):
    return None if name.split(".")[0] in ABSENT else find_spec(name, *others)


PathFinder.find_spec = without_them
"""


def smoke(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
    )


# -- the whole program, CPU against CPU ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], str]:
    """Its output, its JSON and its Markdown, on a machine that has no packages but the ones it needs."""
    folder = tmp_path_factory.mktemp("smoke")
    (folder / "sitecustomize.py").write_text(WITHOUT_PACKAGES)
    # Packages of GPU machines that must not be used for the CPU's numbers.
    for name in ("transformer_engine", "transformer_engine_torch", "apex", "amp_C"):
        (folder / f"{name}.py").write_text("raise FileNotFoundError('this needs a GPU')\n")
    outputs = folder / "out.json", folder / "out.md"
    path = os.pathsep.join([str(folder), str(ROOT)])
    finished = smoke("--cpu", "--json", str(outputs[0]), "--markdown", str(outputs[1]), PYTHONPATH=path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished, json.loads(outputs[0].read_text()), outputs[1].read_text()


def test_every_variant_passes_every_stage_in_both_precisions(run: Any) -> None:
    rows = run[1]["cases"]
    assert {(row["case"]["variant"], row["case"]["dtype"]) for row in rows} == {
        (v, d) for v in VARIANTS for d in DTYPES
    }
    for row in rows:
        assert row["passed"]
        assert row["verdicts"] == dict.fromkeys(STAGES, "pass")
        assert row["tokens_per_second"] == pytest.approx(2 * 32 / row["seconds_per_step"])


def test_float32_agrees_with_itself_and_bfloat16_only_nearly(run: Any) -> None:
    for row in run[1]["cases"]:
        values = {
            entry["quantity"].split(" of ")[0]: entry["value"] for stage in row["stages"].values() for entry in stage
        }
        assert values.keys() == QUANTITIES
        if row["case"]["dtype"] == "fp32":
            assert max(values.values()) < 1e-6
        else:
            assert values["logits"] > 1e-3
            assert values["gradient"] > 1e-3


def test_the_output_is_one_row_a_case_and_a_summary(run: Any) -> None:
    lines = run[0].stdout.splitlines()
    assert [line for line in lines if line.startswith("case ")]
    assert len([line for line in lines if " local " in line]) == 6
    assert lines[-1] == "6 of 6 cases passed"


def test_the_markdown_says_what_ran_where_and_how(run: Any) -> None:
    text = run[2]
    assert f"torch: {torch.__version__.split('+')[0]}" in text
    for name in (
        "### CPU",
        "megatron-core: ",
        "transformer-engine: ",
        "date: 20",
        "command: python tools/gpu_smoke.py --cpu",
    ):
        assert name in text
    assert text.count("| pass | pass | pass | pass | pass |") == 6


def test_help_teaches() -> None:
    finished = smoke("--help")
    assert finished.returncode == 0
    for words in ("python tools/gpu_smoke.py", "--cpu", "nothing is downloaded", "PYTHONPATH=.", "exit status"):
        assert words in " ".join(finished.stdout.split())


def test_a_machine_without_gpu_is_told_about_the_cpu_mode_in_one_line() -> None:
    finished = smoke(MEGATRON_EXO_DEVICE="cpu")
    assert finished.returncode == 1
    assert finished.stderr.count("\n") == 1
    assert "no CUDA device" in finished.stderr
    assert "--cpu runs the same program" in finished.stderr


def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    finished = smoke("--cpu", "--json", str(tmp_path / "missing/out.json"))
    assert finished.returncode == 2
    assert "there is no folder" in finished.stderr


# -- wrong results fail -------------------------------------------------------------------------------------


WRONG = "decoder.layers.1.self_attention.dynamic_mixing.fc2.bias"


def _run_against_wrong_references(folder: str) -> tuple[Result, Result]:
    """What comes of right results: against a reference with wrong numbers, and against one that cannot be compared."""
    from megatron_exo.smoke.checks import record_reference, run_case

    path = Path(folder, "reference.pt")
    record_reference(CASE, path)
    wrong = torch.load(path, weights_only=True)
    wrong["loss"] += 2e-3
    wrong["gradients"][WRONG] *= 1.01
    wrong["masked"][WRONG] *= 1.01
    wrong["losses"][-1] -= 2e-3
    torch.save(wrong, path)
    compared = run_case(CASE, path, BOUNDS["fp32"])
    wrong["gradients"][WRONG] = wrong["gradients"][WRONG][:-1]
    torch.save(wrong, path)
    broken = run_case(CASE, path, BOUNDS["fp32"])
    # Megatron's writer keeps a process for its queue, which a rank that skips the interpreter's teardown would leave.
    for child in multiprocessing.active_children():
        child.terminate()
    return compared, broken


@pytest.fixture(scope="module")
def against_wrong_references(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Result]:
    return run_on_ranks(1, _run_against_wrong_references, str(tmp_path_factory.mktemp("wrong")))[0]


def test_a_wrong_number_fails_its_stage_is_named_and_ends_nothing(
    against_wrong_references: tuple[Result, Result],
) -> None:
    result = against_wrong_references[0]
    assert [result.verdict(stage) for stage in STAGES] == ["pass", "FAIL", "FAIL", "FAIL", "pass", "pass"]
    assert not result.passed
    named = [line.removeprefix(f"FAIL {CASE}: ").rsplit(" ", 3)[0] for line in failures(result)]
    masked = f"gradient with documents masked of {WRONG}"
    assert named == ["loss", f"gradient of {WRONG}", masked, "loss while training"]


def test_an_exception_ends_the_case_at_its_stage_in_one_line(against_wrong_references: tuple[Result, Result]) -> None:
    result = against_wrong_references[1]
    assert [result.verdict(stage) for stage in STAGES] == ["pass", "FAIL", "FAIL", "-", "-", "-"]
    assert result.error == f"ValueError: gradient of {WRONG} has shape (8,) where (7,) is expected"
    assert "Traceback" in result.traceback
    assert result.seconds_per_step is None


# -- the comparisons ----------------------------------------------------------------------------------------


def _gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 16, generator=generator) for name in ("a", "b", "c")}


def _rounded(tensor: Tensor, bits: int) -> Tensor:
    """With ``bits`` bits after the leading one, as TF32 (10) and bfloat16 (7) have."""
    mantissa, exponent = torch.frexp(tensor)
    return torch.ldexp(torch.round(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)


def test_the_gradient_that_deviates_most_is_named() -> None:
    wrong = _gradients()
    wrong["b"][3, 5] += 1.0
    wrong["c"] *= 1.0001
    deviation = largest_relative_error("gradient", wrong, _gradients(), BOUNDS["fp32"].gradient)
    assert not deviation.passed
    assert deviation.quantity == "gradient of b"
    assert deviation.value == pytest.approx(1 / float(_gradients()["b"].norm()), rel=1e-4)


@pytest.mark.parametrize("factor", [-1.0, 0.7, 1.3, 0.0])
def test_a_gradient_of_wrong_sign_or_length_fails_even_in_bfloat16(factor: float) -> None:
    wrong = _gradients() | {"a": factor * _gradients()["a"]}
    assert not largest_relative_error("gradient", wrong, _gradients(), BOUNDS["bf16"].gradient).passed


def test_the_bounds_of_float32_let_neither_tf32_nor_bfloat16_pass() -> None:
    right = _gradients()["a"]
    assert relative_error("logits", _rounded(right, 20), right, BOUNDS["fp32"].logits).passed
    assert not relative_error("logits", _rounded(right, 10), right, BOUNDS["fp32"].logits).passed
    assert not relative_error("logits", right.bfloat16().float(), right, BOUNDS["fp32"].logits).passed
    assert relative_error("logits", right.bfloat16().float(), right, BOUNDS["bf16"].logits).passed


@pytest.mark.parametrize("wrong", [[1.0, float("nan")], [1.0, float("inf")], [1.1, 2.0]])
def test_a_loss_that_is_not_a_number_or_elsewhere_fails(wrong: list[float]) -> None:
    assert not largest_difference("loss", wrong, [1.0, 2.0], 3e-2).passed
    assert largest_difference("loss", [1.01, 2.0], [1.0, 2.0], 3e-2).passed


def test_not_a_number_in_one_gradient_fails_and_is_the_worst() -> None:
    wrong = _gradients()
    wrong["c"][0, 0] = float("nan")
    wrong["a"] += 1
    deviation = largest_relative_error("gradient", wrong, _gradients(), 0.1)
    assert not deviation.passed
    assert deviation.quantity == "gradient of c"
    assert Result(CASE, {"backward": [Deviation("x", 0.2, 0.1), deviation]}).worst() == deviation


def test_one_bit_lost_by_a_checkpoint_is_counted() -> None:
    loaded = _gradients()
    loaded["b"][0, 0] = torch.nextafter(loaded["b"][0, 0], torch.tensor(9.0))
    assert number_of_changed("parameters", _gradients(), _gradients()).passed
    deviation = number_of_changed("parameters", loaded, _gradients())
    assert not deviation.passed
    assert deviation.value == 1


def test_tensors_that_one_side_lacks_are_named() -> None:
    lacking = _gradients()
    del lacking["b"]
    with pytest.raises(ValueError, match="only one side has b"):
        largest_relative_error("gradient", lacking, _gradients(), 0.1)
    with pytest.raises(ValueError, match="zip"):
        largest_difference("loss", [1.0], [1.0, 2.0], 0.1)


# -- one failure is one row ---------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    """A worker whose module is the standard library's ``os``."""
    with Worker(partial(importlib.import_module, "os"), log=tmp_path / "log", timeout_s=120) as worker:
        yield worker


def test_calls_share_a_process_until_one_fails(worker: Worker) -> None:
    first = worker.submit("getpid").result()
    assert worker.submit("getpid").result() == first != os.getpid()
    with pytest.raises(WorkerError, match=r"^FileNotFoundError: .*missing"):
        worker.submit("stat", "missing").result()
    assert worker.submit("getpid").result() != first


def test_a_process_that_dies_is_one_failed_call(worker: Worker) -> None:
    worker.submit("write", 1, b"last words\n").result()
    dying, next_call = worker.submit("_exit", 3), worker.submit("getpid")
    with pytest.raises(WorkerError, match=r"exit code 3.*last words"):
        dying.result()
    assert next_call.result()


def test_a_call_that_hangs_is_given_up(tmp_path: Path) -> None:
    with Worker(partial(importlib.import_module, "os"), log=tmp_path / "log", timeout_s=1) as worker:
        with pytest.raises(WorkerError, match="no answer within 1 s"):
            worker.submit("system", "sleep 60").result()


def test_what_a_failed_process_started_ends_with_it(worker: Worker) -> None:
    child = worker.submit("spawnlp", os.P_NOWAIT, "sleep", "sleep", "60").result()
    assert _is_running(child)
    with pytest.raises(WorkerError):
        worker.submit("stat", "missing").result()
    deadline = time.monotonic() + 10
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(child)


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_errors_are_cut_to_the_line_that_says_something() -> None:
    cuda = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`\n")
    assert one_line(cuda) == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert (
        one_line(RuntimeError("backend='inductor' raised:\nNo working triton\n")) == "RuntimeError: No working triton"
    )
    assert one_line(AssertionError()) == "AssertionError: no message"
    remote = RuntimeError("\n-----\nTraceback (most recent call last):\n  File 'x', line 1\nKeyError: 'step'\n-----\n")
    assert one_line(remote) == "RuntimeError: KeyError: 'step'"


def test_a_failed_case_is_a_row_and_a_line_and_the_others_stay() -> None:
    good = Result(
        CASE,
        {stage: [] for stage in STAGES},
        seconds_per_step=0.5,
        tokens_per_second=8192.0,
        peak_memory_bytes=2 * 10**9,
    )
    bad = Result(
        dataclasses.replace(CASE, dtype="bf16"),
        {"build": [], "forward": [Deviation("loss", 0.5, 0.03)]},
        error="E: out of memory",
    )
    assert cells(good) == (str(CASE), "pass", "pass", "pass", "pass", "pass", "-", "0.5000", "8,192", "2.00")
    assert cells(bad)[1:7] == ("pass", "FAIL", "FAIL", "-", "-", "loss 5.0e-01 (bound 0.03)")
    text = markdown({"device": "NVIDIA X", "torch": "1"}, [good, bad])
    assert text.startswith("### NVIDIA X\n\n- torch: 1\n\n| case |")
    assert len(COLUMNS) == len(cells(bad))
    assert "- FAIL dynamic-e-exoformer local bf16: loss 5.0e-01 (bound 0.03)\n" in text
    assert "- FAIL dynamic-e-exoformer local bf16: E: out of memory\n" in text
    assert summary([good, bad]) == "1 of 2 cases passed"
