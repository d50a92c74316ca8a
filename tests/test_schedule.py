"""The course of a run: a batch that grows, a length that is extended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_exo.checkpoints.inspection import compare
from megatron_exo.data.sample_log import read_sample_log
from megatron_exo.pretrain import main
from tests.programs import MOCK_DATA, MODEL, Outcome, run_program

RUN = "--micro-batch-size 2 --lr 1e-3 --eval-iters 0 --eval-interval 100 --log-interval 1 --num-workers 0"


def pretrain(run: Path, words: str, *more: str) -> Outcome:
    outcome = run_program(main, [*f"{MODEL} {MOCK_DATA} {RUN} {words} --save {run} --load {run}".split(), *more])
    assert outcome.status == 0, outcome.err
    return outcome


def test_a_batch_grows_as_it_is_scheduled_and_takes_every_sample_once(tmp_path: Path) -> None:
    """The thresholds are tokens, at samples 8 and 24."""
    growth = "--step-batch-size-schedule", "0:2 256:4 768:8"
    pretrain(tmp_path / "run", "--train-tokens 2048 --save-interval 100 --exo-log-samples", *growth)
    lines = (tmp_path / "run" / "logs" / "metrics.jsonl").read_text().splitlines()
    consumed = [record["consumed_samples"] for record in map(json.loads, lines) if record["kind"] == "train"]
    assert consumed == [2, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64]
    taken = read_sample_log(tmp_path / "run" / "logs")
    assert [len(taken[step]) for step in sorted(taken)] == [2] * 4 + [4] * 4 + [8] * 5
    assert len({sample for samples in taken.values() for sample in samples}) == 64


@pytest.mark.slow
def test_an_extended_run_is_the_longer_one_to_the_bit(tmp_path: Path) -> None:
    def words(length: int) -> str:
        shape = f"--train-iters {length} --lr-decay-iters {length} --lr-wsd-decay-iters 2 --lr-warmup-iters 1"
        return f"{shape} --lr-decay-style WSD --lr-wsd-decay-style linear --global-batch-size 8 --save-interval 2"

    pretrain(tmp_path / "planned", words(8))
    pretrain(tmp_path / "extended", words(4), "--exit-interval", "2")
    outcome = pretrain(tmp_path / "extended", words(8))
    assert "was planned for 32 samples, now 64" in outcome.out
    difference = compare(tmp_path / "planned" / "iter_0000008", tmp_path / "extended" / "iter_0000008")
    assert (difference.values, difference.reshaped, difference.objects) == ([], {}, [])
