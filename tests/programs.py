"""Run an entry point as a user does: a command line in, exit status and output back.

Python and Megatron take many seconds to start, so the program runs in a process forked from the one that has imported
them, like the ranks of :mod:`tests.ranks`.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import forked, leave

MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
"""The sizes of a model that trains in a moment."""
RUN = "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-3 --eval-iters 1 --eval-interval 100"
MOCK_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 64"

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outcome:
    """What is left of a program."""

    status: int
    out: str
    err: str


def one_line(err: str) -> str:
    """The message on standard error, of which there is one and nothing else."""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    return err.removeprefix("error: ").rstrip("\n")


def run_program(
    main: Callable[[], None],
    arguments: Sequence[object],
    *,
    environment: Mapping[str, str] | None = None,
    largest_file: int | None = None,
    timeout_s: float = 240.0,
) -> Outcome:
    """Call ``main`` with ``sys.argv`` set, in a process of its own, on the CPU.

    Args:
        main: importable by name.
        arguments: the command line after the program's name.
        environment: variables beside those of this process; those of torchrun are not inherited.
        largest_file: bytes after which writing a file fails, as on a full disk.
        timeout_s: seconds after which the program is killed; its status is then negative.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [str(Path(folder) / name) for name in ("out", "err")]
        words = [str(argument) for argument in arguments]
        process = forked().Process(target=_run, args=(main, words, dict(environment or {}), largest_file, streams))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return Outcome(process.exitcode, *(Path(stream).read_text(errors="replace") for stream in streams))


def _run(
    main: Callable[[], None],
    arguments: list[str],
    environment: dict[str, str],
    largest_file: int | None,
    streams: list[str],
) -> None:
    for number, stream in enumerate(streams, start=1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)
    os.environ |= {"OMP_NUM_THREADS": "1", "MEGATRON_EXO_DEVICE": "cpu"} | environment
    multiprocessing.set_start_method("fork", force=True)  # as in an interpreter of one's own; it was inherited
    sys.argv = [main.__module__, *arguments]
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    status: object = 0
    try:
        main()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    leave(status if isinstance(status, int) else 1 if status else 0)
