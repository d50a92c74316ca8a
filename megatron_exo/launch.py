"""Start training: as a rank of torchrun, or by starting torchrun; with the demo's data where none is named.

Used by ``examples/pretrain_exoformer.sh``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_DATA_OPTIONS = ("--data-path", "--data-args-path", "--train-data-path", "--per-split-data-args-path", "--mock-data")
_LAUNCHER_OPTIONS = ("--nproc-per-node", "--nproc_per_node", "--nnodes", "--node-rank", "--node_rank", "--master-addr",
                     "--master_addr", "--master-port", "--master_port", "--rdzv-backend", "--rdzv_backend",
                     "--rdzv-endpoint", "--rdzv_endpoint", "--rdzv-id", "--rdzv_id", "--max-restarts",
                     "--max_restarts", "--signals-to-handle", "--signals_to_handle")  # fmt: skip


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
    and the entry point says how to get data.
    """
    names = {argument.split("=")[0] for argument in arguments}
    prepared = demo_folder() / "data"
    if names & {*_DATA_OPTIONS, "--help", "-h"} or not (prepared / "train.idx").exists():
        return arguments
    added = ["--train-data-path", str(prepared / "train"), "--valid-data-path", str(prepared / "validation")]
    added += ["--test-data-path", str(prepared / "validation")]
    if "--tokenizer-type" not in names:
        added += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(prepared / "tokenizer.model")]
    if not names & {"--preset", "--num-layers"}:
        added += ["--preset", "demo"]
    return [*added, *arguments]


def start_torchrun(arguments: list[str]) -> None:
    """Replace this process by torchrun over the polyglot, with as many ranks as asked for (default: one)."""
    launcher, training = split_arguments(arguments)
    if not any(option.startswith(("--nproc", "--nnodes", "--rdzv")) for option in launcher):
        launcher = ["--nproc-per-node", "1", *launcher]
    if not any(option.startswith(("--master", "--rdzv", "--nnodes")) for option in launcher):
        launcher = ["--standalone", *launcher]
    if not any(option.startswith(("--signals-to-handle", "--signals_to_handle")) for option in launcher):
        # torchrun dies alone of a signal that is not among these; these it passes on, and waits 30 s for the ranks.
        launcher = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", *launcher]
    script = ROOT / "examples" / "pretrain_exoformer.sh"
    # One thread a rank: several ranks share the cores of a machine without GPUs.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *launcher, str(script), *training])


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Take torchrun's options (in either spelling, with ``=`` or a value behind) out of a command line."""
    launcher: list[str] = []
    training: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument.split("=")[0] in _LAUNCHER_OPTIONS:
            launcher.append(argument)
            if "=" not in argument:
                launcher += [value for value in (next(rest, None),) if value is not None]
        else:
            training.append(argument)
    return launcher, training


if __name__ == "__main__":
    start_torchrun(sys.argv[1:])
