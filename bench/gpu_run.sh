#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# One sitting on a machine with a GPU: compile every configuration in parallel (which also fills
# Triton's cache), run the GPU tests, then check and time the operators.
#   bench/gpu_run.sh DIRECTORY [operator ...]     results go to DIRECTORY
# TESTS="path ..." also runs these with pytest where the machine has it; PYTHON picks the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
out=$1
shift
python=${PYTHON:-python3}
export PYTHONPATH=src PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
mkdir -p "$out"
status=0
"$python" bench/aot.py --verbose --output "$out/aot.json" "$@" >"$out/aot.log" 2>&1 || status=1
grep -E '^FAIL|compiled in' "$out/aot.log"
if [[ -n ${TESTS:-} ]]; then
    # shellcheck disable=SC2086 # several paths
    "$python" -m pytest -q -x --no-header -p no:cacheprovider $TESTS 2>&1 | tail -40 || status=1
fi
cp -f bench/results/kernels.json "$out/kernels.json" 2>/dev/null
"$python" bench/kernels.py --output "$out/kernels.json" "$@" 2>&1 | tee "$out/kernels.log"
((PIPESTATUS[0] == 0)) || status=1
exit $status
