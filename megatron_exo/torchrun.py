"""torchrun, as ``examples/pretrain_exoformer.sh`` starts it: its command line and its agent, in this process.

Beside it, this calls the nodes before the agents meet, lets a signal that announces the end of a job reach the ranks
without ending the agent, and says in one line what ended a job.
"""

from __future__ import annotations

import signal
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil
import torch.distributed as dist
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from megatron_exo import console
from megatron_exo.errors import UserError
from megatron_exo.roll_call import call_nodes

_ANNOUNCING = (signal.SIGTERM, signal.SIGUSR1)
"""Signals at which ranks save and end."""
_ENDING = "SIGINT,SIGHUP,SIGQUIT"
"""Signals at which the agent ends the ranks within its ``--shutdown-timeout``."""


def run(words: Sequence[str], script: Path, training: Sequence[str], start_timeout_s: float) -> None:
    """Start the ranks and return when all have ended with status 0.

    Args:
        words: torchrun's options.
        script: what each rank runs, with the arguments ``training``.
        start_timeout_s: seconds for all nodes to come.

    Raises:
        UserError: nodes do not meet, or a rank has failed.
        SystemExit: a signal has ended the ranks.
    """
    args = torchrun.parse_args(["--signals-to-handle", _ENDING, *words, str(script), *training])
    store = _meet(args, start_timeout_s)  # noqa: F841  held: the agent goes on with it
    try:
        with _announcements_passed_on():
            torchrun.run(args)
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    except ChildFailedError as error:
        raise UserError(_what_ended(error)) from None


def _meet(args: Namespace, timeout_s: float) -> dist.Store | None:
    """Call the nodes, if their number and their numbers are known before they meet."""
    is_static = args.rdzv_backend == "static" and not args.rdzv_endpoint
    if not is_static or not args.nnodes.isdecimal() or int(args.nnodes) == 1:
        return None
    args.master_port = args.master_port or 29500  # torchrun's default
    return call_nodes(args.node_rank, int(args.nnodes), args.master_addr, args.master_port, timeout_s)


@contextmanager
def _announcements_passed_on() -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 reach the ranks while the agent waits for them: their status 0 is then the job's.

    The agent's own way is to end with the signal, after 30 seconds at most, whatever ranks have still to write.
    Without ranks that catch the signal it is kept: they are on their way up, or have been told to die of it.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        ranks = [each for each in psutil.Process().children() if _is_rank(each)]
        if not ranks or not all(_catches(each, number) for each in ranks):
            raise SignalException(f"{name}, and no rank is to save", signal.Signals(number))
        count = f"{len(ranks)} ranks, which save and end" if len(ranks) > 1 else "1 rank, which saves and ends"
        console.say(f"{name} is passed on to {count}")
        for each in ranks:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _ANNOUNCING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "LOCAL_RANK" in process.environ()
    except psutil.Error:
        return False


def _catches(process: psutil.Process, number: int) -> bool:
    """Whether a process has a handler for a signal; nowhere but on Linux is that known."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _what_ended(error: ChildFailedError) -> str:
    """The rank that failed first, and how; it has said why, unless a signal took it."""
    rank, failure = error.get_first_failure()
    if failure.exitcode >= 0:
        return f"rank {rank} has ended with status {failure.exitcode}; it says above why"
    guess = " (often the kernel's, for lack of memory)" if failure.exitcode == -signal.SIGKILL else ""
    return (
        f"rank {rank} was ended by {failure.signal_name()}{guess}; with --save and --load, the same command goes on "
        "from the newest checkpoint"
    )
