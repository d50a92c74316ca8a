"""``--exo-log-samples``: which samples of the training set each step has taken, in a file per data-parallel rank.

Two runs have seen the same data in the same order exactly when these files say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_exo.errors import UserError, reason

SAMPLE_ID = "sample_id"


class NumberedSamples(Dataset[dict[str, Tensor]]):
    """A dataset whose samples carry their index, int64 [1], as ``sample_id``."""

    def __init__(self, dataset: Dataset[dict[str, Tensor]]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.dataset[index] | {SAMPLE_ID: torch.tensor([int(index)])}

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet while a worker process unpickles this object
            raise AttributeError(name)
        return getattr(self.dataset, name)  # Megatron asks datasets for their split


def numbering(provider: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., tuple[Any, Any, Any]]:
    """Wrap a datasets provider: the training samples carry their index."""

    def numbered(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        train, valid, test = provider(num_samples, vp_stage)
        return train if train is None else NumberedSamples(train), valid, test

    numbered.is_distributed = True  # type: ignore[attr-defined]  # each rank opens the files
    return numbered


class SampleLog:
    """Appends a line ``{"iteration": N, "samples": [...]}`` for every micro-batch."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def note(self, iteration: int, batch: dict[str, Tensor]) -> None:
        self._file.write(json.dumps({"iteration": iteration, "samples": batch[SAMPLE_ID].flatten().tolist()}) + "\n")


def read_sample_log(folder: Path) -> dict[int, list[int]]:
    """Iteration → its samples, sorted, from the files of all ranks in a run's ``logs``.

    A run that was resumed repeats the iterations after its last checkpoint; what it took at last counts.

    Raises:
        UserError: a line is none that a run writes: which.
    """
    steps: dict[int, list[int]] = {}
    for path in sorted(folder.glob("samples-dp*.jsonl")):
        mine: dict[int, list[int]] = {}
        previous = 0
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                iteration, samples = _record(line)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                raise UserError(
                    f"{path}, line {number} is no record of a step ({reason(error)}); remove it, if the run was killed "
                    "while it wrote it, or copy the file again"
                ) from error
            if iteration < previous:
                mine = {step: samples for step, samples in mine.items() if step < iteration}
            previous = iteration
            mine.setdefault(iteration, []).extend(samples)
        for step, samples in mine.items():
            steps[step] = sorted(steps.get(step, []) + samples)
    return steps


def _record(line: bytes) -> tuple[int, list[int]]:
    record = json.loads(line)
    iteration, samples = record["iteration"], record["samples"]
    if type(iteration) is not int or type(samples) is not list or not all(type(each) is int for each in samples):
        raise ValueError("its numbers are no whole ones")
    return iteration, samples
