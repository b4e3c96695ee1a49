#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Carries the embedded tritonserver, and the few packages beside torch that serving needs, to a
# machine that has torch and triton but no package registry:
#   scripts/bundle.sh pack ARCHIVE [--python 3.12]   here: about 40 MB of tar.xz
#   scripts/bundle.sh unpack ARCHIVE VENV            there: makes VENV beside that Python's packages
# Afterwards `VENV/bin/python -m glmserve.cli serve` runs there from this checkout.
#
# The server's own wheel is cut to its binary, the Python backend and one stub. numpy stays below 2
# for the stub, and only inside VENV. Environment: PIP_EXTRA_ARGS for pip, PYTHON names the
# interpreter that unpacks (default python3).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

die() {
    printf 'bundle: %s\n' "$*" >&2
    exit 1
}

# Versions are those of constraints/gpu.txt; what it does not name follows from pydantic's pin.
PACKAGES=(numpy nvidia-pytriton llguidance pydantic tritonclient)
FOLLOWING=(annotated-types typing-inspection python-rapidjson)

pack() {
    local archive=$1 version=$2 python=${PYTHON:-$root/.venv/bin/python} pins=() name
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT  # work stays set until then
    for name in "${PACKAGES[@]}"; do
        pins+=("$(grep -iE "^${name}==" "$root/constraints/gpu.txt")") || die "$name has no pin"
    done
    # What pydantic pins itself to.
    pins+=("pydantic-core==$("$python" -c 'import pydantic_core; print(pydantic_core.__version__)')")
    # shellcheck disable=SC2086 # several arguments
    "$python" -m pip install -q --no-deps --no-compile --only-binary=:all: --target "$work/site" \
        --python-version "$version" --implementation cp \
        --platform manylinux_2_35_x86_64 --platform manylinux_2_31_x86_64 \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
        ${PIP_EXTRA_ARGS:-} "${pins[@]}" "${FOLLOWING[@]}"
    cd "$work/site"
    local server=pytriton/tritonserver
    find "$server/python_backend_stubs" -mindepth 1 -maxdepth 1 ! -name "$version" -exec rm -r {} +
    find "$server" -mindepth 1 -maxdepth 1 ! -name bin ! -name backends \
        ! -name python_backend_stubs -exec rm -r {} +
    rm -f nvidia_pytriton.libs/libpython*
    rm -rf bin numpy/tests numpy/*/tests
    tar -C "$work" -c site | xz -T0 -6 >"$archive.new"
    mv "$archive.new" "$archive"
    printf '%s: %s bytes\n' "$archive" "$(stat -c %s "$archive")"
}

unpack() {
    local archive=$1 venv=$2 python=${PYTHON:-python3} site outer
    "$python" -m venv --without-pip "$venv"
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    # The unpacking Python's own packages come after the bundle's: torch from there, numpy from here.
    outer=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    tar -C "$venv" -xJf "$archive"
    cp -a "$venv/site/." "$site/"
    rm -r "$venv/site"
    printf '%s\n%s\n' "$root/src" "$outer" >"$site/glmserve-bundle.pth"
    "$venv/bin/python" -c 'import glmserve, numpy, torch; print(numpy.__version__, torch.__version__)'
}

case ${1-} in
pack)
    version=3.12
    [[ ${3-} == --python ]] && version=${4:?--python needs a version}
    pack "$(realpath -m "${2:?pack needs an archive}")" "$version"
    ;;
unpack) unpack "${2:?unpack needs an archive}" "${3:?unpack needs a folder}" ;;
*) die 'use: bundle.sh pack ARCHIVE [--python 3.12] | bundle.sh unpack ARCHIVE VENV' ;;
esac
