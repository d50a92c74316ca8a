#!/usr/bin/env bash
# Lint and the quick tests; with --all also the slow tests and the type check. Other arguments go to pytest.
#
#   bash tests/run.sh [--all] [PYTEST ARGUMENT…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(-m "not slow")
checks=("ruff check ." "ruff format --check .")
arguments=()
for argument in "$@"; do
    if [[ $argument == --all ]]; then
        selection=()
        checks+=("mypy")
    else
        arguments+=("$argument")
    fi
done

bash tools/setup_env.sh dev
# Tests start several gloo ranks each: one thread per rank, or they fight for the cores.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false CUDA_DEVICE_MAX_CONNECTIONS=1

failed=()
for check in "${checks[@]}"; do
    read -ra words <<<"$check"
    .venv/bin/python -m "${words[@]}" || failed+=("$check")
done
# Two test files at a time: much of a test is the start of its programs, which one core does.
.venv/bin/python -m pytest -q -n 2 --dist loadfile --durations=30 "${selection[@]}" "${arguments[@]}" || failed+=("pytest")

((${#failed[@]} == 0)) || printf 'tests/run.sh: failed: %s\n' "${failed[@]}"
echo "tests/run.sh: wall time $SECONDS s"
((${#failed[@]} == 0))
