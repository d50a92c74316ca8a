"""Megatron's own GPT trains, saves and resumes on CPUs, on every kind of layout.

The data are Megatron's mock documents, and dropout is on, so that going on as if never stopped needs the random states
of the checkpoint too.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.platform import plain_gpt
from tests.ranks import run_on_ranks

STEPS = 8
MICRO_BATCHES = 4  # of two samples each, per step, over all data-parallel ranks
_DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
LAYOUTS = {
    "tp2-sp": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "dp2-distributed-optimizer-overlap": [*_DISTRIBUTED, "--ddp-bucket-size", "4000"],
    "dp2-distributed-optimizer-bf16": ["--use-distributed-optimizer", "--bf16"],
    "tp2-bf16-recompute": ["--tensor-model-parallel-size", "2", "--bf16", "--recompute-activations"],
}
QUICK = "dp2-distributed-optimizer-overlap"


def _train(layout: str, *arguments: object) -> list[float]:
    """Run on two ranks; the mean loss of every step."""
    schedule = ["--train-iters", STEPS, "--eval-interval", STEPS]
    words = [str(word) for word in (*LAYOUTS[layout], *schedule, *arguments)]
    reports = [report for report in run_on_ranks(2, plain_gpt.train, words, process_group=False) if report]
    per_step = MICRO_BATCHES // len(reports)
    losses = []
    for start in range(0, len(reports[0]), per_step):
        step = [micro_batch for report in reports for micro_batch in report[start : start + per_step]]
        losses.append(sum(total for total, _ in step) / sum(count for _, count in step))
    return losses


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow) for name in LAYOUTS]
)
def test_a_plain_gpt_learns_and_goes_on_from_a_checkpoint_as_if_never_stopped(layout: str, tmp_path: Path) -> None:
    whole = _train(layout, "--save", tmp_path / "whole", "--save-interval", STEPS // 2)
    assert len(whole) == STEPS
    assert all(math.isfinite(loss) for loss in whole)
    # A model that knows nothing is at ln(128); the mock documents are easy to learn.
    assert whole[0] == pytest.approx(math.log(128), abs=0.1)
    assert whole[-1] < whole[0] - 0.5
    resumed = _train(layout, "--load", tmp_path / "whole", "--ckpt-step", STEPS // 2)
    # The same ranks sum in the same order: the losses are equal in bf16, too.
    assert resumed == pytest.approx(whole[STEPS // 2 :], abs=1e-6)
