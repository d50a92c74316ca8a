"""Runs of four iterations that are stopped after two, and what is asked of them."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_exo.config import ExoConfig
from megatron_exo.pretrain import main
from tests.programs import MOCK_DATA, MODEL, RUN, Outcome, one_line, run_program

SAVING = "--save-interval 2 --log-interval 1 --num-workers 0"


def pretrain(run: Path, *words: str, largest_file: int | None = None) -> Outcome:
    """Train, or go on training, in the folder ``run``; every two iterations are saved."""
    arguments = f"{MODEL} {MOCK_DATA} {RUN} {SAVING}".split()
    return run_program(main, [*arguments, "--save", run, "--load", run, *words], largest_file=largest_file)


def error_of(outcome: Outcome) -> str:
    assert outcome.status == 1
    return one_line(outcome.err)


def exo_of(args: Namespace, **changes: Any) -> ExoConfig:
    axes = {name: getattr(args, f"exo_{name}") for name in vars(ExoConfig())}
    return ExoConfig(**axes).replace(**changes)


def rates_of(run: Path) -> dict[int, float]:
    """Iteration → learning rate."""
    records = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").read_text().splitlines()]
    return {record["iteration"]: record["learning_rate"] for record in records if record["kind"] == "train"}


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()
