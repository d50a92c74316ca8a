"""A process that runs smoke-test cases, apart from the program that asks: it may crash, hang or run out of memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_exo.errors import one_line
from megatron_exo.smoke.cases import Result

_SPAWN = multiprocessing.get_context("spawn")  # a forked process could not use CUDA


class WorkerError(RuntimeError):
    """A request was not answered: one line on what became of it."""


class Worker:
    """Calls functions, in order, in one process for as long as all goes well.

    After an error, what the process left on the device cannot be trusted: it is replaced for the next call.

    Args:
        start: called in the new process; returns the module whose functions are called. It must pickle.
        log: file to which everything that the process prints is appended.
        timeout_s: seconds after which a call is given up and the process killed.
    """

    def __init__(self, start: Callable[[], Any], *, log: Path, timeout_s: float) -> None:
        self._start_module, self._log, self._timeout_s = start, log, timeout_s
        self._running: tuple[Any, Connection] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._end()  # a call in progress ends with it
        self._thread.shutdown()

    def submit(self, function: str, *args: Any) -> Future[Any]:
        """Call the module's ``function(*args)``; the future raises :class:`WorkerError` where it gives no result."""
        return self._thread.submit(self._call, function, args)

    def _call(self, function: str, args: tuple[Any, ...]) -> Any:
        process, connection = self._running = self._running or self._start()
        succeeded, answer = False, f"no answer within {self._timeout_s:.0f} s"
        try:
            connection.send((function, args))
            if connection.poll(self._timeout_s):
                succeeded, answer = connection.recv()
        except (EOFError, OSError):
            process.join()
            answer = f"its process ended (exit code {process.exitcode}), last saying: {self._last_words()}"
        if not succeeded:
            self._end()
            raise WorkerError(answer)
        if isinstance(answer, Result) and answer.error:
            self._end()
        return answer

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(theirs, self._start_module, self._log))
        process.start()
        theirs.close()
        return process, ours

    def _end(self) -> None:
        """Kill the process, which has nothing to lose, with the ones that write its checkpoints."""
        if self._running is not None:
            process, _ = self._running
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # where it has not got as far as having a group
            process.join()
            self._running = None

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


def _serve(connection: Connection, start: Callable[[], Any], log: Path) -> None:
    """Answer calls until the other side is gone."""
    os.setsid()
    with log.open("ab") as sink:
        for descriptor in (1, 2):
            os.dup2(sink.fileno(), descriptor)
    module: Any = None
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            os.killpg(os.getpid(), signal.SIGKILL)
        try:
            module = module or start()
            answer = True, getattr(module, function)(*args)
        except Exception as error:
            traceback.print_exc()
            answer = False, one_line(error)
        connection.send(answer)


def start_checks(on_gpu: bool) -> ModuleType:
    """Make this process a world of one rank on ``cuda:0`` or the CPU, and return :mod:`megatron_exo.smoke.checks`.

    Megatron must not be imported before: the platform decides what becomes of its small functions.

    Raises:
        RuntimeError: a GPU is wanted and there is none.
    """
    # Transformer Engine asks for TF32 in float32 products whatever torch's switches say; cuBLAS puts this first.
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    if not on_gpu:
        os.environ["MEGATRON_EXO_DEVICE"] = "cpu"
        # Where it finds these, Megatron runs their CUDA kernels on CPU tensors too; None makes their import fail.
        for name in ("transformer_engine", "transformer_engine_torch", "apex", "amp_C"):
            sys.modules[name] = None  # type: ignore[assignment]
    import torch
    import torch.distributed as dist

    from megatron_exo import platform

    if on_gpu:
        if not platform.is_gpu():
            raise RuntimeError("torch sees no CUDA device, or MEGATRON_EXO_DEVICE=cpu keeps it from being used")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.cuda.set_device(0)
    platform.activate()
    dist.init_process_group(platform.communication_backend(), store=dist.HashStore(), rank=0, world_size=1)

    from megatron_exo.smoke import checks

    return checks
