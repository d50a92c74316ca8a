"""A loss or a gradient that is NaN or Inf ends the run: with the step, the rank, and the step's batch in a file."""

from __future__ import annotations

import os
import re
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_exo.errors import UserError

_MEGATRONS = re.compile(r"Unexpected result .*\(message='(.*)'\)")
"""How Megatron's result validation words its error. The iteration it names is one too many, or starts from 0 again
where a run was resumed on another layout."""


_REQUEST = ".wanted"
"""Suffix of the file by which a rank asks for the batch."""
_POLL_S = 1.0
_PATIENCE_S = 10.0


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
        if not self._batches:
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{os.getpid()}")  # whoever sees the name may read the file
        torch.save({"batches": self._batches, **facts}, new)
        new.replace(path)
        return True


step_batches = StepBatches()


@contextmanager
def batch_saved_when_not_finite(args: Namespace, folder: Path) -> Iterator[None]:
    """Save the batch of the step in which Megatron rejects a result, and say so.

    Only the first tensor-parallel ranks of the first and the last pipeline stage read batches. If another rank finds
    something, one of those, which has the same data, saves the batch in its place.

    Args:
        args: Megatron's, for the rank and the iteration in progress.
        folder: where ``iteration-N-rank-R.pt`` is written, named after the rank that has found it: ``batches`` (a list
            of dicts, ``tokens``, ``labels``, ``loss_mask``, … each [b, s]), ``iteration`` and ``rank``.

    Raises:
        UserError: the step, what was found, and the file.
    """
    is_over = threading.Event()
    if args.world_size > 1:  # a rank that waits for the others in a collective can still write by a thread
        threading.Thread(target=_save_for_others, args=(args, folder, is_over), daemon=True).start()
    try:
        yield
    except RuntimeError as error:
        if (found := _MEGATRONS.search(str(error))) is None:
            raise
        iteration, reason = args.curr_iteration + 1, found[1]
        path = folder / f"iteration-{iteration}-rank-{args.rank}.pt"
        is_saved = step_batches.save(path, iteration=iteration, rank=args.rank) or _is_saved_by_another(args, path)
        where = f"its batch is in {path}, see --replay" if is_saved else "no rank has its batch"
        raise UserError(
            f"{reason}, iteration {iteration}; {where}; the checkpoints before it are whole, lower the learning rate "
            "or look into the batch, and start again from one of them"
        ) from error
    finally:
        is_over.set()


def _is_saved_by_another(args: Namespace, path: Path) -> bool:
    """Ask for the batch, and wait a moment; whether it has come."""
    if args.world_size == 1:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of an earlier start that came this far
    request = path.with_suffix(_REQUEST)
    request.write_text(str(parallel_state.get_data_parallel_rank()))
    deadline = time.monotonic() + _PATIENCE_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    request.unlink(missing_ok=True)
    return path.exists()


def _save_for_others(args: Namespace, folder: Path, is_over: threading.Event) -> None:
    """Save the batch of this rank for others of the same data-parallel rank that ask for it."""
    while not is_over.wait(_POLL_S):
        iteration = getattr(args, "curr_iteration", -1) + 1  # before the first step there is none
        for request in folder.glob(f"iteration-{iteration}-rank-*{_REQUEST}"):
            with suppress(OSError):  # it may have been answered by another
                is_answered = request.with_suffix(".pt").exists()  # its finder may end now, and this rank in a write
                if not is_answered and request.read_text() == str(parallel_state.get_data_parallel_rank()):
                    finder = int(request.stem.rpartition("-")[2])
                    step_batches.save(request.with_suffix(".pt"), iteration=iteration, rank=finder)
