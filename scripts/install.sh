#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The one way to install glmserve: `make setup`, CI and docker/Dockerfile all call this script.
# It makes (or takes over) a virtual environment, installs the package (as a link to src/) with
# the tested set of versions, and leaves a stamp: a run with nothing to do ends in milliseconds.
#
#   --venv DIR        where the environment is or shall be       (default .venv)
#   --device KIND     cpu | gpu: which file of constraints/      (default: gpu if nvidia-smi lists one)
#   --extras LIST     extras of pyproject.toml, comma separated  (default embedded,dev)
#
# Environment: PYTHON names the interpreter for a new environment; PIP_EXTRA_ARGS is passed to
# pip (an index or a wheel folder, say). pip's own PIP_* variables and files work as always.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

die() {
    printf 'install: %s\n' "$*" >&2
    exit 1
}

venv=.venv device='' extras=embedded,dev
while (($#)); do
    case $1 in
    --venv) venv=${2:?--venv needs a folder} && shift 2 ;;
    --device) device=${2:?--device needs cpu or gpu} && shift 2 ;;
    --extras) extras=${2-} && shift 2 ;;
    *) die "unknown argument $1" ;;
    esac
done

if [[ -z $device ]]; then
    device=cpu
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
        device=gpu
    fi
fi
constraints=constraints/$device.txt
[[ -f $constraints ]] || die "--device $device: no such file $constraints"

# The interpreter must be 3.11 or 3.12: the embedded server needs numpy < 2, which has no wheels
# for later ones. A candidate is run, not just found: version-manager shims may exist and fail.
usable() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3; do
        if usable "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
        [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON is not a working Python 3.11 or 3.12"
    done
    die "no Python 3.11 or 3.12 on PATH; install one, or name it: PYTHON=/path/to/python3.11"
}

fingerprint() {
    {
        printf '%s\n' "$root" "$device" "$extras" "${PIP_EXTRA_ARGS:-}"
        cat pyproject.toml "$constraints" scripts/install.sh
    } | sha256sum | cut -d' ' -f1
}

# Two `make`s at once (serve beside test) must not install into one environment together.
if command -v flock >/dev/null; then
    exec 9<pyproject.toml
    flock 9
fi

stamp=$venv/.glmserve-installed
wanted=$(fingerprint)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && usable "$venv/bin/python"; then
    exit 0
fi

if [[ -e $venv ]] && ! usable "$venv/bin/python"; then
    die "$venv has no working Python 3.11 or 3.12; move it away and run this again"
fi
if [[ ! -e $venv ]]; then
    python=$(find_python)
    printf 'install: making %s with %s\n' "$venv" "$("$python" --version)"
    "$python" -m venv "$venv" || {
        rm -rf "$venv"
        die "$python cannot make virtual environments (on Debian and Ubuntu: install python3-venv)"
    }
fi

printf 'install: %s set into %s (a first time takes minutes)\n' "$device" "$venv"
rm -f "$stamp"
# shellcheck disable=SC2086 # PIP_EXTRA_ARGS is a list of words
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$constraints" ${PIP_EXTRA_ARGS:-} --editable ".${extras:+[$extras]}" || {
    [[ $device == gpu ]] || printf '%s\n' \
        "install: constraints/cpu.txt expects PyTorch's CPU build. If pip chose a CUDA build, point" \
        "install: it at the CPU wheels: PIP_EXTRA_ARGS='--extra-index-url URL' make setup" >&2
    die "pip failed (see above)"
}
printf '%s\n' "$wanted" >"$stamp"
