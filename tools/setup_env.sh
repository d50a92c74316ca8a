#!/usr/bin/env bash
# Make or update .venv at the repository root: megatron-exo in editable form with the extras asked for.
#
#   bash tools/setup_env.sh [EXTRA…]          extras as in pyproject.toml; they add to those already installed
#   bash tools/setup_env.sh --print-python    only say which Python would be used
#
# $PYTHON names the interpreter; otherwise PATH, pyenv's and uv's versions are searched for Python 3.12 or 3.13.
# When nothing changed since the last complete run, this returns at once.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
stamp=$venv/megatron_exo.stamp # two lines: the extras, and "installing", "failed" or the fingerprint of what is there
heartbeat_pid=

say() { echo "setup_env: $*"; }
die() {
    echo "setup_env: $*" >&2
    exit 1
}

# Print "MAJOR.MINOR PATH" of interpreter $1, or fail. It is really run, because a pyenv shim may exist and not work,
# with the modules that Debian splits off; inside a virtual environment the path is that of the Python below it.
describe_python() {
    "$1" -I -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2], sys._base_executable)' 2>/dev/null
}

find_python() {
    local candidate found
    local -a candidates=(
        python3 python3.12 python3.13
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[23].*/bin/python
        "${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python}"/cpython-3.1[23].*/bin/python3
    )
    [[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        found=$(describe_python "$candidate") || continue
        if [[ $found == 3.1[23]\ * ]]; then
            echo "${found#* }"
            return
        fi
    done
    [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON is not a working Python 3.12 or 3.13 with venv; set it to one, or unset it to search"
    die "no Python 3.12 or 3.13 with venv found; install one (apt install python3.12-venv, pyenv install 3.12, or uv python install 3.12) or set PYTHON to its path"
}

# The distinct words among the arguments, sorted, on one line.
distinct() { tr ' ' '\n' <<<"$*" | sed '/^$/d' | sort -u | paste -sd ' '; }

fingerprint() { { echo "$root" && cat "$root/setup.py" "$root/pyproject.toml" "$venv/pyvenv.cfg"; } | sha256sum | cut -d ' ' -f 1; }

# Set `extras` and `state` from the stamp; both are empty where there is none.
read_stamp() {
    extras='' state=''
    [[ ! -f $stamp ]] || { read -r extras && read -r state; } <"$stamp" || true
}

write_stamp() { printf '%s\n%s\n' "$1" "$2" >"$stamp.new" && mv "$stamp.new" "$stamp"; }

is_up_to_date() {
    read_stamp
    [[ -x $venv/bin/python && $state == "$(fingerprint)" && $(distinct "$extras" "$@") == "$extras" ]]
}

check_extras() {
    local extra known
    known=$(sed -n '/^\[project.optional-dependencies\]/,/^\[tool/s/^\([a-z]*\) = .*/\1/p' "$root/pyproject.toml" | paste -sd ' ')
    for extra in "$@"; do
        [[ " $known " == *" $extra "* ]] || die "unknown extra '$extra'; pyproject.toml has: $known"
        [[ $extra != te ]] || nvidia-smi -L 2>/dev/null | grep -q '^GPU' ||
            die "extra 'te' refused: no CUDA GPU here, and without one an installed Transformer Engine breaks training on the CPU; leave it out"
    done
}

check_python_matches() {
    local wanted present
    [[ -n ${PYTHON:-} && -x $venv/bin/python ]] || return 0
    wanted=$(describe_python "$PYTHON") || die "PYTHON=$PYTHON does not run; set it to a Python 3.12 or 3.13, or unset it"
    present=$(describe_python "$venv/bin/python") || return 0
    [[ ${wanted%% *} == "${present%% *}" ]] ||
        die "$venv has Python ${present%% *} but PYTHON=$PYTHON is ${wanted%% *}; remove $venv to change, or unset PYTHON"
}

# Make .venv where there is none, and anew where it is unusable: half made, its Python gone, or pip killed in it.
ensure_venv() {
    local python
    if [[ $state == installing ]]; then
        say "an earlier installation was interrupted: making .venv anew"
    elif [[ ! -e $venv ]]; then
        say "making .venv"
    elif ! "$venv/bin/python" -m pip --version &>/dev/null; then
        say ".venv does not work: making it anew"
    else
        return 0
    fi
    python=$(find_python)
    say "using $python"
    "$python" -m venv --clear "$venv"
}

start_heartbeat() {
    local started=$SECONDS
    # Output and lock are closed for `sleep`, which outlives the loop by some seconds.
    while sleep 15 &>/dev/null && kill -0 $$ 2>/dev/null; do
        say "still installing: $((SECONDS - started)) s, $(du -sh "$venv" 2>/dev/null | cut -f 1) in .venv"
    done 9>&- &
    heartbeat_pid=$!
}

stop_heartbeat() {
    [[ -n $heartbeat_pid ]] || return 0
    kill "$heartbeat_pid" 2>/dev/null || true
    wait "$heartbeat_pid" 2>/dev/null || true
    heartbeat_pid=
}

pip_install() { PIP_DISABLE_PIP_VERSION_CHECK=1 "$venv/bin/python" -m pip install --quiet --progress-bar off "$@"; }

# Transformer Engine's torch extension is published as source only. It compiles against the environment's torch (hence
# no build isolation) and the CUDA 13.0 headers of NVIDIA's wheels, the release torch 2.14 is built with.
install_transformer_engine() {
    local site_packages
    say "compiling Transformer Engine's torch extension: 10 minutes and more on few cores"
    pip_install ninja pybind11 wheel \
        'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-cccl==13.0.*' || return
    site_packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
    NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 CUDA_HOME=$site_packages/nvidia/cu13 \
        pip_install --no-build-isolation --editable "${root}[te]"
}

# Called in a condition, where `set -e` does not act: every step says `|| return`.
install_extras() {
    local without_te
    without_te=$(tr ' ' '\n' <<<"$1" | sed '/^te$/d' | paste -sd ,)
    pip_install --editable "${root}${without_te:+[$without_te]}" || return
    [[ " $1 " != *" te "* ]] || install_transformer_engine
}

main() {
    local argument extras state previous
    local -a wanted=()
    for argument in "$@"; do
        case $argument in
            --print-python) find_python && return ;;
            -*) die "unknown option $argument; usage: bash tools/setup_env.sh [--print-python] [EXTRA…]" ;;
            *) wanted+=("$argument") ;;
        esac
    done
    check_python_matches
    ! is_up_to_date "${wanted[@]}" || return 0
    check_extras "${wanted[@]}"
    if command -v flock >/dev/null; then
        exec 9>"$root/.venv.lock"
        flock -n 9 || { say "waiting for another setup_env.sh in this tree" && flock 9; }
        ! is_up_to_date "${wanted[@]}" || return 0
    fi

    read_stamp
    ensure_venv
    previous=$extras
    extras=$(distinct "$previous" "${wanted[@]}")
    say "installing megatron-exo${extras:+ with extras: $extras} (a fresh .venv: 1-4 minutes, about 6 GB)"
    trap stop_heartbeat EXIT
    trap 'die "interrupted; the next run makes .venv anew"' INT TERM
    write_stamp "$extras" installing
    start_heartbeat
    if ! install_extras "$extras"; then
        write_stamp "$previous" failed
        die "pip failed, see above; .venv keeps what it had: run again when the cause is removed"
    fi
    stop_heartbeat
    write_stamp "$extras" "$(fingerprint)"
    say "done in $SECONDS s; .venv/bin/python -m megatron_exo.doctor says what works here"
}

main "$@"
