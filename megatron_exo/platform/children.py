"""Processes that a rank forks (writers of checkpoints, loaders of data) end with it, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> None:
    """Let the kernel send this process a signal when the one that has started it dies; nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_with_torchrun() -> None:
    """Take the death of torchrun's agent, if one has started this process, for SIGTERM.

    An agent that is killed ends no rank itself. Left alone they would go on, on devices and in a folder that the next
    start wants, and nobody would see what they print.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGTERM)


def end_children_with_this_process() -> None:
    """Let the kernel kill what this process forks from now on when it dies; nothing on systems that cannot.

    A rank that is killed (by the kernel for memory, by torchrun, by a person) ends no child itself, and each that is
    left holds hundreds of megabytes: a job that is restarted again and again fills the machine.
    """
    if sys.platform != "linux":
        return
    libc, parent = ctypes.CDLL(None), [0]  # loaded here: a child of many threads had better not

    def remember() -> None:
        parent[0] = os.getpid()

    def follow() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of them: the parent's end is theirs
        if os.getppid() != parent[0]:  # it has died in between
            os._exit(1)

    os.register_at_fork(before=remember, after_in_child=follow)
