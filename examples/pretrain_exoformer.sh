#!/usr/bin/env bash
""":"
# Train an ExoFormer. Valid for bash and for Python, since torchrun runs whatever it is given with Python:
#
#   torchrun --nproc-per-node 8 examples/pretrain_exoformer.sh --preset 450M --data-path data/train …
#   bash examples/pretrain_exoformer.sh [--nproc-per-node N] [arguments of torchrun, then of training]
#   bash examples/pretrain_exoformer.sh --nnodes N --node-rank I --master-addr HOST …      on each of N nodes
#   bash examples/pretrain_exoformer.sh --run-file examples/falsification_1b.toml [arguments that win over the file's]
#
# --dry-run prints the plan of a run and starts nothing.
# Without data arguments it trains the demo preset on what examples/quickstart.sh prepared.
# All arguments: bash examples/pretrain_exoformer.sh --help
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python="$(command -v python3)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # what is started is this checkout
exec "$python" -P -m megatron_exo.launch "$@"
":"""
from megatron_exo.launch import train

if __name__ == "__main__":
    train()
