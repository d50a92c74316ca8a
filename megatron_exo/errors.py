"""Errors that a user can mend: programs show them as one line, without a traceback; and what others mean, in one."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class UserError(ValueError):
    """A request that cannot be met; the message says what is wrong, why, and what to do."""


_PATIENCE_S = 60
"""torchrun ends all ranks as soon as the first exits: for so long, let it be the one that speaks."""
_BROKEN = re.compile(
    r"gloo.*(Connection (?:closed|reset) by peer(?: \[[^]]*\]:\d+)?|Broken pipe)"
    r"|remote process exited or there was a network error"
)
"""What gloo and NCCL say of a connection that another rank's end has broken."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@contextmanager
def one_line_errors(storage_hint: str = "", interrupt_hint: str = "") -> Iterator[None]:
    """Turn a :class:`UserError`, or storage that is full or forbidden, into one line on standard error and status 1.

    And Ctrl-C into one line of each machine and status 130.

    Args:
        storage_hint: what a full or read-only disk means for the work at hand.
        interrupt_hint: what being interrupted means for it.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends another
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"interrupted{'; ' if interrupt_hint else ''}{interrupt_hint}", file=sys.stderr)
        _leave_others(128 + signal.SIGINT)
    except UserError as error:
        leave(str(error))
    except BaseException as error:
        trouble = _storage_trouble(error, storage_hint) or _checkpoint_trouble(error) or _lost_contact(error)
        if trouble is None:
            raise
        leave(trouble, only_here=True)


def leave(message: str, *, status: int = 1, only_here: bool = False) -> NoReturn:
    """End this process with one line on standard error.

    Before ranks are connected they all see the same command line, so one process of each machine speaks; later, and
    for trouble that other ranks need not have (``only_here``), every rank speaks and names itself.
    """
    line = " ".join(message.split())
    if only_here or _is_connected():
        print(f"error: rank {os.environ.get('RANK', '0')}: {line}", file=sys.stderr)
        _leave_others(status)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {line}", file=sys.stderr, flush=True)
    else:
        time.sleep(_PATIENCE_S)
    sys.exit(status)


def reason(error: BaseException) -> str:
    """Why something could not be read, in some words: PyTorch says it in the middle of a page of advice."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    what = f"it names {named[1]}, which is no plain data" if named else str(error)
    return f"{type(error).__name__}: {what}".splitlines()[0].split(". ")[0][:300]


def one_line(error: BaseException) -> str:
    """The exception's type and the line of its message that says most.

    That is the first: what follows in CUDA's errors is general advice. But torch.compile's begin with lines that only
    introduce the next, and errors of another process bring a traceback, whose last line counts.
    """
    message = str(error)
    lines = [line.strip() for line in message.splitlines() if any(map(str.isalnum, line))]
    if "Traceback (most recent call last):" in message:
        lines.reverse()
    return f"{type(error).__name__}: {next((line for line in lines if not line.endswith(':')), 'no message')}"


def _leave_others(status: int) -> NoReturn:
    """End this process although other ranks may wait for it in a collective, and threads of its own for them."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for child in multiprocessing.active_children():  # a checkpoint's save leaves a manager behind
        child.kill()  # it may have this process's handler of SIGTERM
    os._exit(status)


def _is_connected() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _storage_trouble(error: BaseException | None, hint: str) -> str | None:
    """What to say if the error, or one it came from, is about full or forbidden storage.

    Megatron passes errors of its checkpoint writers on as text.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        name = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        for number in (*_FULL, errno.EACCES):
            if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
                what = f"{os.strerror(number)}{name}"
                if number == errno.EACCES:
                    return f"{what}; give this user access to it, or choose another place"
                return f"cannot write: {what}{'; ' if hint else ''}{hint}"
        error = error.__cause__ or error.__context__
    return None


def _checkpoint_trouble(error: BaseException) -> str | None:
    """What to say if the error is PyTorch's ``CheckpointException``, which tells the first rank all ranks' failures."""
    failures = getattr(error, "failures", None)
    if type(error).__name__ != "CheckpointException" or failures is None:
        return None
    reasons = [f"{type(failure).__name__} on rank {rank}: {failure}" for rank, (failure, _) in failures.items()]
    return f"a checkpoint failed to {error.args[0]}: {'; '.join(reasons) or 'see what rank 0 says'}"


def _lost_contact(error: BaseException) -> str | None:
    """What to say if another rank's end has broken a connection: a traceback for each rank would hide the reason."""
    found = _BROKEN.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    reason = found[1] or found[0]
    return f"lost another rank: {reason}; what has ended that one is said by itself, or by what has started it"
