"""``tools/import_reference.py``: logits for comparison, and a checkpoint that training goes on from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.golden_values import GOLDEN, checkpoint, expected

ROOT = Path(__file__).parent.parent.parent
NAME = "dynamic_exoformer_elementwise"
FILE = str(GOLDEN / "variants" / f"{NAME}.ckpt.pt")
TOOL = "tools/import_reference.py"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300, check=False)


def test_logits_of_an_import_are_the_authors_alone_and_on_a_layout(tmp_path: Path) -> None:
    golden = expected("variants", NAME)
    torch.save(golden["tokens"], tmp_path / "tokens.pt")
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    for launcher, layout in (([sys.executable], []), (torchrun, ["--tensor-model-parallel-size", "2"])):
        logits = tmp_path / "logits.pt"
        done = _run(*launcher, TOOL, FILE, "--tokens", str(tmp_path / "tokens.pt"), "--logits", str(logits), *layout)
        assert done.returncode == 0, done.stderr[-3000:]
        computed = torch.load(logits, weights_only=True)
        assert computed.dtype == torch.float32
        assert computed.shape == golden["logits"].shape
        assert (computed - golden["logits"]).abs().max() < 2e-5
        logits.unlink()


@pytest.mark.slow
def test_training_goes_on_from_an_imported_checkpoint(tmp_path: Path) -> None:
    done = _run(sys.executable, TOOL, FILE, "--save", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    step = checkpoint("variants", NAME).step
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(step)
    arguments = [
        "--exo-variant",
        "dynamic-e-exoformer",
        "--num-layers",
        "3",
        "--hidden-size",
        "32",
        "--num-attention-heads",
        "4",
    ]
    arguments += [
        "--kv-channels",
        "8",
        "--ffn-hidden-size",
        "64",
        "--seq-length",
        "32",
        "--max-position-embeddings",
        "64",
    ]
    arguments += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "64", "--micro-batch-size", "2"]
    arguments += [
        "--train-iters",
        "2",
        "--lr",
        "1e-3",
        "--eval-iters",
        "1",
        "--eval-interval",
        "2",
        "--log-interval",
        "1",
    ]
    done = _run(
        sys.executable,
        "-m",
        "megatron_exo.pretrain",
        *arguments,
        "--load",
        str(tmp_path),
        "--finetune",
        "--num-workers",
        "0",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"loaded checkpoint {step}" in done.stdout or "loaded checkpoint" in done.stdout
    assert "iteration 2/2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([FILE], "nothing to do"),
        ([FILE, "--tokens", "x.pt"], "go together"),
        (["missing.pt", "--save", "x"], "missing.pt"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = _run(sys.executable, TOOL, *arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr
