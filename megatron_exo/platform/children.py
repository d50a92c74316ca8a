"""Processes that a rank forks (writers of checkpoints, loaders of data) end with it, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_children_with_this_process() -> None:
    """Let the kernel kill what this process forks from now on when it dies; nothing on systems that cannot.

    A rank that is killed (by the kernel for memory, by torchrun, by a person) ends no child itself, and each that is
    left holds hundreds of megabytes: a job that is restarted again and again fills the machine.
    """
    if sys.platform != "linux":
        return
    libc, parent = ctypes.CDLL(None), [0]

    def remember() -> None:
        parent[0] = os.getpid()

    def follow() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent[0]:  # it has died in between
            os._exit(1)

    os.register_at_fork(before=remember, after_in_child=follow)
