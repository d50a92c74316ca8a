"""Writing to disks: what goes wrong, told as it was, and in the background without a GPU.

Used only through :mod:`megatron_exo.platform.patches`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, TemporalAsyncCaller

from megatron_exo.checkpoints import failed_saves


def raise_storage_errors(original: Callable[..., Any]) -> Any:
    """Wrap ``FileSystemWriterAsync.write_preloaded_data``: raise the operating system's error.

    The original returns what torch's writer makes of a write that failed ("unexpected pos 704 vs 598"), and its caller
    passes on the type of that alone.
    """

    @functools.wraps(original)
    def write(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        error = answer[1] if isinstance(answer[1], BaseException) else None
        while error is not None:
            # A traceback keeps views of what was to be written in a cycle, and the collector of Python 3.12 crashes on
            # those of BytesIO.
            error.__traceback__ = None
            if isinstance(error, OSError):
                break
            error = error.__cause__ or error.__context__
        if error is not None and kwargs.get("results_queue") is None:  # else it is a thread, whose error nobody sees
            raise error
        return answer

    return staticmethod(write)


def results_queue_of_a_fork(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_write_results_queue``, whose queue lives in a process: fork it.

    A spawned one imports the program anew, which takes the first save seconds, and outlives a rank that is killed.
    """

    @functools.wraps(original)
    def get_write_results_queue(mp_mode: str = "fork") -> Any:
        return original("fork")

    return get_write_results_queue


def writer_process_of_its_own(queue: AsyncCallsQueue) -> TemporalAsyncCaller:
    """In the place of ``AsyncCallsQueue._get_async_caller``: a process that is forked for one save and ends with it.

    All writers of a rank put their results into one queue, so a save waits for the one before it: Megatron's persistent
    worker takes them one by one as well.
    """
    failed_saves.survived(queue.maybe_finalize_async_calls)(blocking=True)
    return TemporalAsyncCaller()
