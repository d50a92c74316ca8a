"""Errors that a user can mend: programs show them as one line, without a traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A request that cannot be met; the message says what is wrong, why, and what to do."""


_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


@contextmanager
def one_line_errors(storage_hint: str = "") -> Iterator[None]:
    """Turn a :class:`UserError`, or storage that cannot be written, into one line on standard error and exit status 1.

    Every rank that fails exits; the line is printed by the first rank alone, unless the trouble is one rank's own.

    Args:
        storage_hint: what a full or read-only disk means for the work at hand.
    """
    try:
        yield
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except Exception as error:
        trouble = _storage_trouble(error)
        if trouble is None:
            raise
        rank = os.environ.get("RANK", "0")
        print(f"error: rank {rank} cannot write: {trouble}{'; ' if storage_hint else ''}{storage_hint}", file=sys.stderr, flush=True)
        # Other ranks wait for this one in a collective and other threads may hold files: leave without them.
        os._exit(1)


def _storage_trouble(error: BaseException | None) -> str | None:
    """The operating system's words if the error, or one it came from, is about full or forbidden storage.

    Megatron writes checkpoints in worker processes and passes their errors on as text.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in _STORAGE:
            return f"{os.strerror(error.errno)}{f' ({error.filename})' if error.filename else ''}"
        for number in _STORAGE:
            if os.strerror(number) in str(error):
                return os.strerror(number)
        error = error.__cause__ or error.__context__
    return None
