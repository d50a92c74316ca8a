"""``tools/import_reference.py``: logits for comparison, and a checkpoint that training goes on from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_exo import pretrain
from tests.golden_values import GOLDEN, checkpoint, expected
from tests.programs import run_program
from tools import import_reference

ROOT = Path(__file__).parent.parent.parent
NAME = "dynamic_exoformer_elementwise"
FILE = GOLDEN / "variants" / f"{NAME}.ckpt.pt"
GO_ON = (
    "--exo-variant dynamic-e-exoformer --num-layers 3 --hidden-size 32 --num-attention-heads 4 --kv-channels 8 "
    "--ffn-hidden-size 64 --seq-length 32 --max-position-embeddings 64 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 64 --micro-batch-size 2 --train-iters 2 --lr 1e-3 --eval-iters 1 --eval-interval 2 --log-interval 1 "
    "--num-workers 0 --finetune"
).split()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    torch.save(expected("variants", NAME)["tokens"], tmp_path / "tokens.pt")
    return tmp_path / "tokens.pt"


def _assert_golden(logits: Path) -> None:
    computed, golden = torch.load(logits, weights_only=True), expected("variants", NAME)["logits"]
    assert computed.dtype == torch.float32
    assert computed.shape == golden.shape
    assert (computed - golden).abs().max() < 2e-5


def test_logits_of_an_import_are_the_authors(tokens: Path, tmp_path: Path) -> None:
    done = run_program(import_reference.main, [FILE, "--tokens", tokens, "--logits", tmp_path / "logits.pt"])
    assert done.status == 0, done.err
    _assert_golden(tmp_path / "logits.pt")


@pytest.mark.slow
def test_logits_on_a_layout_of_ranks_are_the_authors(tokens: Path, tmp_path: Path) -> None:
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    arguments = [
        "tools/import_reference.py",
        str(FILE),
        "--tokens",
        str(tokens),
        "--logits",
        str(tmp_path / "logits.pt"),
    ]
    done = subprocess.run(
        [*torchrun, *arguments, "--tensor-model-parallel-size", "2"],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _assert_golden(tmp_path / "logits.pt")


def test_training_goes_on_from_an_imported_checkpoint(tmp_path: Path) -> None:
    done = run_program(import_reference.main, [FILE, "--save", tmp_path])
    assert done.status == 0, done.err
    step = checkpoint("variants", NAME).step
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(step)
    done = run_program(pretrain.main, [*GO_ON, "--load", tmp_path])
    assert done.status == 0, done.err
    assert "loaded the weights of" in done.out
    assert "iteration 2/2" in done.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([FILE], "nothing to do"),
        ([FILE, "--tokens", "x.pt"], "go together"),
        (["missing.pt", "--save", "unused"], "missing.pt"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(arguments: list[object], words: str) -> None:
    done = run_program(import_reference.main, arguments)
    assert done.status != 0
    assert words in done.err
    assert "Traceback" not in done.err
