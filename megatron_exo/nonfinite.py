"""A loss or a gradient that is NaN or Inf ends the run: with the step, the rank, and the step's batch in a file."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_exo.errors import UserError

_MEGATRONS = re.compile(r"Unexpected result .*\(message='(.*)'\)")
"""How Megatron's result validation words its error. The iteration it names is one too many, or starts from 0 again
where a run was resumed on another layout."""


class StepBatches:
    """The micro-batches of the training step in progress, as this rank has read them; references, not copies."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._batches: list[dict[str, Tensor]] = []

    def note(self, step: int, batch: dict[str, Tensor]) -> None:
        """Keep a micro-batch; the first of a new step lets those of the step before go."""
        if step != self._step:
            self._step, self._batches = step, []
        self._batches.append(batch)

    def save(self, path: Path, **facts: Any) -> bool:
        """Write what is kept, and ``facts``, for ``torch.load(…, weights_only=True)``; whether there was anything."""
        if self._batches:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"batches": self._batches, **facts}, path)
        return bool(self._batches)


step_batches = StepBatches()


@contextmanager
def batch_saved_when_not_finite(args: Namespace, folder: Path) -> Iterator[None]:
    """Save the batch of the step in which Megatron rejects a result, and say so.

    Args:
        args: Megatron's, for the rank and the iteration in progress.
        folder: where ``iteration-N-rank-R.pt`` is written: ``batches`` (a list of dicts, ``tokens``, ``labels``,
            ``loss_mask``, … each [b, s]), ``iteration``, ``rank`` and ``reason``.

    Raises:
        UserError: the step, what was found, and the file. Ranks of the middle of a pipeline keep no batch: they name
            the step alone.
    """
    try:
        yield
    except RuntimeError as error:
        if (found := _MEGATRONS.search(str(error))) is None:
            raise
        iteration, reason = args.curr_iteration + 1, found[1]
        path = folder / f"iteration-{iteration}-rank-{args.rank}.pt"
        where = "this rank keeps no batch, so it is not saved here"
        if step_batches.save(path, iteration=iteration, rank=args.rank, reason=reason):
            where = f"its batch is in {path}, see --exo-replay"
        raise UserError(
            f"{reason}, iteration {iteration}; {where}; the checkpoints before it are whole, lower the learning rate "
            "or look into the batch, and start again from one of them"
        ) from error
