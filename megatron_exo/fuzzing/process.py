"""Damaged files are read in processes of bounded memory and time, and the outcome of each is counted."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from megatron_exo.fuzzing.kinds import KINDS, damaged, sample_arguments
from megatron_exo.fuzzing.samples import STEP

OUTCOMES = ("read", "refused", "other exception", "crash", "time-out", "over memory")
FAILURES = OUTCOMES[2:]
_PRELOAD = ["megatron_exo.fuzzing.preload"]
_NO_MEMORY = ("bad_alloc", "allocate memory", "not enough memory", "out of memory", "malloc of size")


def attempt(read: Callable[[Path], object], folder: Path) -> tuple[str, str]:
    """The outcome of one reading, and what it said."""
    from megatron_exo.errors import UserError

    try:
        read(folder)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        if _lacked_memory(error):
            return "over memory", said
        if not isinstance(error, UserError):
            return "other exception", said
        is_line = 0 < len(str(error)) < 2000 and "\n" not in str(error)
        return ("refused", said) if is_line else ("other exception", f"not one line: {said}")
    return "read", ""


def _lacked_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def _status(name: str) -> int:
    """A line of ``/proc/self/status``, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def _work(
    name: str, samples: Path, folder: Path, seed: int, first: int, end: int, memory: int, pipe: Connection
) -> None:
    """Read inputs ``first`` to ``end`` and send the outcome of each."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    for number in (1, 2):  # libraries in C++ and Rust print
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(samples, folder)
    kind = KINDS[name]()
    sample_arguments(folder)
    if not kind.has_manifest:
        (folder / STEP / "exo_manifest.json").unlink(missing_ok=True)
    valid = kind.take(folder) if kind.take else (folder / kind.file).read_bytes()
    outcome, said = attempt(kind.read, folder)
    pipe.send(("valid", outcome, said, 0))
    baseline = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (baseline + memory, resource.RLIM_INFINITY))
    for number in range(first, end):
        content = damaged(kind, valid, name, seed, number)
        if kind.put is not None:
            kind.put(folder, content)
        else:
            (folder / kind.file).write_bytes(content)
        outcome, said = attempt(kind.read, folder)
        pipe.send((number, outcome, said[:300], _status("VmPeak") - baseline))


@dataclass
class Result:
    """What became of the inputs of one kind."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """Number of the input, outcome, what was said."""
    most_memory: int = 0
    """Bytes of address space beyond what the worker had at its start."""
    seconds: float = 0.0


def fuzz(name: str, samples: Path, *, inputs: int, seed: int, memory: int, time_out: float) -> Result:
    """Read ``inputs`` damaged files of a kind.

    Args:
        samples: what :func:`make_samples` wrote.
        memory: bytes of address space that a worker may take beyond what it begins with.
        time_out: seconds for one input.

    Raises:
        RuntimeError: the valid file is not read.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    result, began, next_one = Result(), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as scratch:
        while next_one < inputs:
            receiver, sender = context.Pipe(duplex=False)
            arguments = (name, samples, Path(scratch) / "samples", seed, next_one, inputs, memory, sender)
            worker = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            sender.close()
            ready = False
            while next_one < inputs:
                try:
                    if not receiver.poll(time_out if ready else 120.0):
                        ended = ("time-out", f"longer than {time_out:g} s")
                        break
                    number, outcome, said, extra = receiver.recv()
                except EOFError:
                    worker.join()
                    if (worker.exitcode or 0) > 0:
                        raise RuntimeError(f"{name}: the worker itself failed before input {next_one}") from None
                    ended = ("crash", f"signal {-(worker.exitcode or 0)}")
                    break
                if number == "valid":
                    if outcome != "read":
                        raise RuntimeError(f"{name}: the valid file is not read: {outcome}, {said}")
                    ready = True
                    continue
                result.counts[outcome] += 1
                result.most_memory = max(result.most_memory, extra)
                if outcome in FAILURES:
                    result.failures.append((number, outcome, said))
                next_one += 1
                _show_progress(name, next_one, inputs, time.monotonic() - began)
            else:
                ended = None
            if ended is not None:
                worker.kill()
                if not ready:
                    raise RuntimeError(f"{name}: no worker gets ready: {ended[1]}")
                result.counts[ended[0]] += 1
                result.failures.append((next_one, *ended))
                next_one += 1
            worker.join()
            receiver.close()
    result.seconds = time.monotonic() - began
    return result


def _show_progress(name: str, done: int, inputs: int, seconds: float) -> None:
    if sys.stderr.isatty() or done % 1000 == 0:
        end = "\r" if sys.stderr.isatty() else "\n"
        print(f"{name}: {done}/{inputs}, {done / seconds:.0f}/s  ", end=end, file=sys.stderr, flush=True)
