"""A rank that is killed leaves no process behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from megatron_exo.platform.children import end_children_with_this_process

_fork = multiprocessing.get_context("fork")


def _child(pids: Connection, deeper: int) -> None:
    pids.send(os.getpid())
    if deeper:
        _fork.Process(target=_child, args=(pids, deeper - 1)).start()
    time.sleep(60)


def _rank(pids: Connection, ends_children: bool) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    if ends_children:
        end_children_with_this_process()
    _fork.Process(target=_child, args=(pids, 1)).start()
    time.sleep(60)


def _ignores_ctrl_c(pid: int) -> bool:
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("SigIgn:"))
    return bool(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("ends_children", [True, False], ids=["with it", "without it"])
def test_children_and_their_children_end_with_a_killed_process(ends_children: bool) -> None:
    here, there = _fork.Pipe(duplex=False)
    rank = _fork.Process(target=_rank, args=(there, ends_children))
    rank.start()
    children = [psutil.Process(here.recv()) for _ in range(2)]
    for child in children:
        assert _ignores_ctrl_c(child.pid) == ends_children
    os.kill(rank.pid or 0, signal.SIGKILL)
    rank.join()
    _, alive = psutil.wait_procs(children, timeout=10 if ends_children else 0.5)
    for child in alive:
        child.kill()
    assert len(alive) == (0 if ends_children else 2)
