"""``--exo-tolerate-failed-saves``: a checkpoint for which there is no room costs that checkpoint, and not the run.

All ranks must know of it, or some train on while others wait. A shard that cannot be written Megatron tells all ranks
(``CheckpointException``). What the first rank writes alone (the folder, the index, the manifest) it would raise there
alone: such an error is noted here, and all ranks are told at the next point that they pass together. Without the
option, an error ends the run where it occurs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_exo import console
from megatron_exo.errors import UserError

_MEGATRONS = re.compile(r"Worker failure: |An error is caught while starting worker \d+, error: ")
"""What Megatron puts before the operating system's words."""
_SHOWN = 4
"""Ranks whose reasons are told; a full disk has all of them complain."""


class SaveFailedError(RuntimeError):
    """On every rank: a checkpoint was not written; the message is the first rank's."""


class _State:
    noted: str | None = None
    """What went wrong on this rank in the save in progress."""
    lost: str | None = None
    """What went wrong in the newest save that has ended, on the first rank."""


def is_tolerant() -> bool:
    """Whether this run has the option; a program without Megatron's arguments has not."""
    from megatron.training import get_args

    try:
        return bool(getattr(get_args(), "exo_tolerate_failed_saves", False))
    except AssertionError:
        return False


def noted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what the first rank writes alone: an error is noted, and what follows in the same save is left undone."""

    @functools.wraps(original)
    def write(*args: Any, **kwargs: Any) -> Any:
        if not is_tolerant():
            return original(*args, **kwargs)
        if _State.noted is None:
            try:
                return original(*args, **kwargs)
            except OSError as error:
                note(error)
        return None

    return write


def note(error: BaseException) -> None:
    _State.noted = str(error)


def tell_all_ranks() -> None:
    """Raise on every rank what the first has noted in this save, if anything.

    Raises:
        SaveFailedError: the first rank's error.
    """
    told, _State.noted = [_State.noted], None
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        raise SaveFailedError(told[0])


def errors_as_results(original: Callable[..., None]) -> Any:
    """Wrap ``FileSystemWriterAsync.write_preloaded_data_multithread``: what a thread raises is a result, too.

    The original raises it past the queue by which all ranks learn of each other's results.
    """

    @functools.wraps(original)
    def write(*args: Any, **kwargs: Any) -> None:
        try:
            original(*args, **kwargs)
        except Exception as error:
            if not is_tolerant():
                raise
            (kwargs.get("global_results_queue") or args[-1]).put(RuntimeError(str(error)))

    return staticmethod(write)


def survived(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``save_checkpoint`` and ``maybe_finalize_async_save`` as the training loop calls them: go on, and say so."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> None:
        if not is_tolerant():
            return original(*args, **kwargs)
        try:
            original(*args, **kwargs)
        except SaveFailedError as error:
            _lose(str(error))
        except CheckpointException as error:
            reasons = [
                f"rank {rank}: {_MEGATRONS.sub('', str(failure[0]))}" for rank, failure in error.failures.items()
            ]
            more = [f"and {len(reasons) - _SHOWN} more"] if len(reasons) > _SHOWN else []
            _lose("; ".join(reasons[:_SHOWN] + more))
        else:
            if _State.noted is not None:  # on the first rank, by the tracker, which comes after everything else
                _lose(_State.noted)
                _State.noted = None
        return None

    return call


def _lose(why: str) -> None:
    if dist.get_rank() == 0:
        _State.lost = " ".join(why.split())
        console.say(f"a checkpoint could not be written: {_State.lost}; the run goes on, those before it are whole")


def succeeded() -> None:
    """A checkpoint is whole and named."""
    _State.lost = None


@contextmanager
def last_one_checked() -> Iterator[None]:
    """A run, to its end or an early exit.

    Raises:
        UserError: it is over, and has lost its last checkpoint; the other ranks leave with the first.
    """
    try:
        yield
    except SystemExit as end:
        if not end.code:
            _check_last()
        raise
    _check_last()


def _check_last() -> None:
    if not is_tolerant():
        return
    told = [_State.lost]
    dist.broadcast_object_list(told, src=0)
    if told[0] is None:
        return
    if dist.get_rank() > 0:
        raise SystemExit(1)
    raise UserError(
        f"the run is over, but its last checkpoint could not be written: {told[0]}; make room and start again with "
        "the same command, which trains again what came after the one before"
    )
