"""Runs of the training program that save checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_exo.pretrain import main
from tests.programs import MOCK_DATA, MODEL, RUN, Outcome, run_program

SAVING = "--save-interval 2 --log-interval 1 --num-workers 0"


def pretrain(run: Path, *words: object, data: str = MOCK_DATA, largest_file: int | None = None) -> Outcome:
    """Train in the folder ``run``, or go on training there; every two iterations are saved."""
    arguments = f"{MODEL} {data} {RUN} {SAVING}".split()
    return run_program(main, [*arguments, "--save", run, "--load", run, *words], largest_file=largest_file)


def losses(run: Path) -> dict[int, float]:
    """The loss of every iteration, as it was recorded last."""
    records = map(json.loads, (run / "logs" / "metrics.jsonl").read_text().splitlines())
    return {record["iteration"]: record["lm_loss"] for record in records if record["kind"] == "train"}
