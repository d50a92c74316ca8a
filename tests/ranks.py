"""Run a function on N gloo ranks of this machine.

``torch`` and Megatron take seconds to import, so ranks are forked from a server process that has imported them once;
each run gets fresh processes, which begin together, and its own process group.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.synchronize import Barrier
from typing import Any, NoReturn

_context = multiprocessing.get_context("forkserver")
_PRELOAD = ["tests.preload"]


def forked() -> ForkServerContext:
    """The context of all processes that tests fork: its one server has the same imports whichever test is the first."""
    _context.set_forkserver_preload(_PRELOAD)
    multiprocessing.forkserver.ensure_running()
    return _context


class RankError(AssertionError):
    """What went wrong on which rank, with its traceback."""


def run_on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0, process_group: bool = True
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a new gloo world, with the CPU platform active.

    Args:
        function: importable by name (a module-level function); it, its arguments and results must pickle.
        process_group: whether to make the default process group; a program that makes and destroys it itself gets
            the environment that torchrun would give it.
        timeout_s: seconds after which all ranks are killed.

    Returns:
        The results in rank order.

    Raises:
        RankError: the first failure, or a time-out.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = forked()
    held = _held_port()
    port = held.getsockname()[1]
    start = context.Barrier(world_size, timeout=timeout_s)
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(target=_main, args=(rank, world_size, port, start, sender, function, args, process_group))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        return _collect({receiver: rank for rank, (receiver, _) in enumerate(pipes)}, time.monotonic() + timeout_s)
    finally:
        for process in ranks:
            if process.exitcode is None:
                process.join(timeout=5)
            if process.exitcode is None:
                process.kill()
        for receiver, _ in pipes:
            receiver.close()
        held.close()


def _collect(waiting: dict[Connection, int], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} did not finish in time")
        for receiver in ready:
            rank = waiting.pop(receiver)  # type: ignore[arg-type]
            try:
                ok, value = pickle.loads(receiver.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            if not ok:
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _main(
    rank: int,
    world_size: int,
    port: int,
    start: Barrier,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    process_group: bool,
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        import torch
        import torch.distributed as dist

        from megatron_exo import platform

        logging.getLogger().setLevel(logging.ERROR)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Megatron prints a lot; a failure comes back as a traceback
        torch.set_num_threads(1)
        platform.activate()
        start.wait()
        if process_group:
            dist.init_process_group("gloo", rank=rank, world_size=world_size)
        answer = (True, function(*args))
        if process_group:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        answer = (False, traceback.format_exc())
    # Plain pickle copies tensors by value; the process may end before the parent reads.
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    leave(0)


def leave(status: int) -> NoReturn:
    """End this process without the interpreter's teardown, in which gloo's threads may hang."""
    for child in multiprocessing.active_children():  # a checkpoint's save leaves a manager behind
        child.kill()  # it may have this process's handler of SIGTERM
    os._exit(status)


def _held_port() -> socket.socket:
    """A socket with a port that the system gives to nobody else while it is open; who asks for that port may listen."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
