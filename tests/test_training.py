"""Whole runs through the entry point: training, logging, saving, resuming on another layout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ranks import run_on_ranks

MODEL = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"]
MODEL += ["--max-position-embeddings", "32", "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "64"]
RUN = [
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "8",
    "--train-iters",
    "6",
    "--lr",
    "1e-2",
    "--lr-decay-style",
    "constant",
]
RUN += [
    "--eval-iters",
    "1",
    "--eval-interval",
    "100",
    "--log-interval",
    "1",
    "--num-workers",
    "0",
    "--use-distributed-optimizer",
]


def _pretrain(arguments: Sequence[str]) -> None:
    from megatron_exo.pretrain import main

    sys.argv = ["pretrain", *arguments]
    main()


def _train(folder: Path, ranks: int, *arguments: str) -> dict[int, float]:
    """Run the entry point and return the loss of every iteration it recorded."""
    run_on_ranks(ranks, _pretrain, [*MODEL, *RUN, "--save", str(folder), *arguments], process_group=False)
    lines = (folder / "logs" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {r["iteration"]: r["lm_loss"] for r in records if r["kind"] == "train"}


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["dynamic-e-exoformer", "e-nuresformer"])
def test_a_run_resumed_on_another_layout_goes_on_as_if_it_had_not_stopped(tmp_path: Path, variant: str) -> None:
    exo = ("--exo-variant", variant)
    whole = _train(tmp_path / "whole", 1, *exo, "--save-interval", "3")
    resume = ("--load", str(tmp_path / "whole"), "--ckpt-step", "3", "--save-interval", "100")
    layout = ("--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "2")
    resumed = _train(tmp_path / "resumed", 4, *exo, *resume, *layout)
    assert sorted(whole) == [1, 2, 3, 4, 5, 6]
    assert sorted(resumed) == [4, 5, 6]
    for iteration, loss in resumed.items():
        # 4e-5: six printed digits, and gradients summed in another order through three steps of Adam.
        assert loss == pytest.approx(whole[iteration], abs=4e-5), iteration
    assert whole[6] < whole[1] - 0.05


@pytest.mark.slow
def test_losses_do_not_depend_on_the_data_parallel_size_or_overlap(tmp_path: Path) -> None:
    one = _train(tmp_path / "one", 1, "--save-interval", "6")
    two = _train(tmp_path / "two", 2, "--save-interval", "6", "--overlap-grad-reduce", "--overlap-param-gather")
    for iteration, loss in two.items():
        assert loss == pytest.approx(one[iteration], abs=4e-5), iteration


@pytest.mark.slow
def test_bf16_with_fp32_masters_follows_fp32(tmp_path: Path) -> None:
    single = _train(tmp_path / "fp32", 1, "--save-interval", "6")
    half = _train(tmp_path / "bf16", 1, "--save-interval", "6", "--bf16")
    for iteration, loss in half.items():
        # bf16 keeps 8 bits: activations are off by 2^-9 each, and the losses here are about 4.
        assert loss == pytest.approx(single[iteration], abs=3e-2), iteration


@pytest.mark.slow
def test_megatrons_tensorboard_logging_works(tmp_path: Path) -> None:
    _train(tmp_path / "run", 1, "--save-interval", "6", "--tensorboard-dir", str(tmp_path / "tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("lm loss")) == 6
    assert len(events.Scalars("z loss")) == 6


def test_a_checkpoint_is_evaluated_without_naming_a_schedule(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    _train(saved, 1, "--save-interval", "6")
    evaluation = ["--skip-train", "--load", str(saved), "--micro-batch-size", "2", "--global-batch-size", "8"]
    evaluation += "--eval-iters 1 --eval-interval 1 --num-workers 0 --save-interval 100".split()
    evaluation += ["--save", str(tmp_path / "evaluated")]
    run_on_ranks(1, _pretrain, [*MODEL, *evaluation], process_group=False)
    text = (tmp_path / "evaluated" / "logs" / "rank-0.log").read_text()
    assert "none, evaluation only" in text
    assert "validation loss" in text
