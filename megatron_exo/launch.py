"""Start training: as a rank of torchrun, or by starting torchrun; with the demo's data where none is named.

Used by ``examples/pretrain_exoformer.sh``.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_exo import run_file
from megatron_exo.errors import UserError, one_line_errors

ROOT = Path(__file__).resolve().parent.parent
_MEETING = ("--master", "--rdzv")
"""How torchrun's options begin that say where nodes meet."""


def demo_folder() -> Path:
    """Where ``examples/quickstart.sh`` puts its data and its run."""
    return ROOT / os.environ.get("MEGATRON_EXO_DEMO", "runs/demo")


def train() -> None:
    """One rank: run the entry point with ``sys.argv``, completed by the demo's arguments where no data is named."""
    sys.argv[1:] = with_demo(sys.argv[1:])
    from megatron_exo.pretrain import main

    main()


def with_demo(arguments: list[str]) -> list[str]:
    """Add what the quickstart prepared to arguments that name no data.

    A preset, a variant and everything else that is given stays. Where the quickstart has not run, nothing is added,
    and the entry point says how to get data. A run file stands for itself.
    """
    names = {argument.split("=")[0] for argument in arguments}
    prepared = demo_folder() / "data"
    complete = {*run_file.DATA_OPTIONS, run_file.OPTION, "--help", "-h"}
    if names & complete or not (prepared / "train.idx").exists():
        return arguments
    added = ["--train-data-path", str(prepared / "train"), "--valid-data-path", str(prepared / "validation")]
    added += ["--test-data-path", str(prepared / "validation")]
    if "--tokenizer-type" not in names:
        added += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(prepared / "tokenizer.model")]
    if not names & {"--preset", "--num-layers"}:
        added += ["--preset", "demo"]
    return [*added, *arguments]


def main() -> None:
    """Start torchrun over the polyglot, with as many ranks as asked for (default: one).

    ``--dry-run`` starts none: this process plans for all of them.
    """
    with one_line_errors():
        launcher, training = split_arguments(sys.argv[1:])
        path = run_file.named_by(training)
        if path is not None:
            launcher = [*run_file.launcher_words(path), *launcher]
        if "--dry-run" in training:
            os.environ |= {"WORLD_SIZE": str(planned_world_size(launcher)), "RANK": "0", "LOCAL_RANK": "0"}
        else:
            _start(torchrun_words(launcher, os.environ), training)
    if "--dry-run" in training:
        sys.argv[1:] = training
        train()


def _start(launcher: list[str], training: list[str]) -> None:
    from megatron_exo import torchrun  # which takes seconds

    timeout = run_file.value_of("--exo-start-timeout", training)
    try:
        timeout_s = float(timeout or run_file.START_TIMEOUT_S)
    except ValueError:
        raise UserError(f"--exo-start-timeout {timeout} is no number of seconds") from None
    # One thread a rank: several ranks share the cores of a machine without GPUs.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torchrun.run(launcher, ROOT / "examples" / "pretrain_exoformer.sh", training, timeout_s)


def torchrun_words(launcher: list[str], environment: Mapping[str, str]) -> list[str]:
    """What torchrun is started with: the options that are given, completed so that ranks find each other.

    Several nodes that ``srun`` has started find their number and the first of them in Slurm's variables.

    Raises:
        UserError: there are several nodes, and nothing says where they meet.
    """
    words = list(launcher)
    nodes = run_file.value_in(words, "--nnodes")
    if nodes is None and not any(option.startswith(("--nproc", "--rdzv")) for option in words):
        words = ["--nproc-per-node", "1", *words]
    meets = any(option.startswith(_MEETING) for option in words)
    if nodes in (None, "1") and not meets:
        words = ["--standalone", *words]
    elif not meets and not {"PET_MASTER_ADDR", "PET_RDZV_ENDPOINT"} & environment.keys():
        if "SLURM_NODEID" not in environment:
            raise UserError(
                f"{nodes} nodes, and nothing says where they meet; start this on each with --master-addr HOST, the "
                "first one's name, and --node-rank N from 0 on, or with srun --ntasks-per-node 1; for one: --nnodes 1"
            )
        first = first_host(environment["SLURM_JOB_NODELIST"])
        words = ["--node-rank", environment["SLURM_NODEID"], "--master-addr", first, *words]
    return words


def first_host(nodelist: str) -> str:
    """Of Slurm's short form: ``node[03-06,9],other`` → ``node03``."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodelist)
    if match is None:
        raise UserError(f"SLURM_JOB_NODELIST {nodelist!r} names no node; pass --master-addr HOST and --node-rank N")
    return "".join(part for part in match.groups() if part)


def planned_world_size(launcher: list[str]) -> int:
    """The ranks that torchrun would start.

    Raises:
        UserError: their number is not given as one, as torchrun allows.
    """
    size = 1
    for option in ("--nnodes", "--nproc-per-node"):
        value = run_file.value_in(launcher, option) or "1"
        if not value.isdecimal():
            raise UserError(f"--dry-run cannot plan for {option} {value}, which is no number; pass {option} N")
        size *= int(value)
    return size


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Take torchrun's options (in either spelling, with ``=`` or a value behind) out of a command line."""
    launcher: list[str] = []
    training: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if run_file.spelled(argument) in run_file.LAUNCHER_OPTIONS:
            launcher.append(argument)
            if "=" not in argument:
                launcher += [value for value in (next(rest, None),) if value is not None]
        else:
            training.append(argument)
    return launcher, training


if __name__ == "__main__":
    main()
