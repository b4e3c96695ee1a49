#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The table of one rank of GLM-5.2 on one GPU, at full size: its kernels are compiled first by as
# many processes as there are sizes, on a few layers; then one process measures every size.
#   bench/rank_run.sh FILE.json      needs the whole GPU; PYTHON picks the interpreter
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
out=$1
python=${PYTHON:-python3}
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
contexts=8192,102400
rank() { "$python" -c 'import sys; from glmserve.cli import main; sys.exit(main(sys.argv[1:]))' \
    bench-rank --ranks 8 --rank 0 --synthetic "$@"; }

small=$(mktemp -d)
trap 'rm -rf "$small"' EXIT
"$python" -c 'import sys, pathlib; from bench.two_ranks import cut_down
cut_down(5, pathlib.Path(sys.argv[1]))' "$small/config.json" || exit
started=$SECONDS
for rows in 1 6 32 192; do
    rank --config "$small/config.json" --rows $rows --context $contexts --memory-gb 20 --no-split \
        >"$small/$rows.log" 2>&1 || tail -n 5 "$small/$rows.log" &
done
rank --config "$small/config.json" --rows 6 --prefill 8192 --memory-gb 20 --no-split \
    >"$small/prefill.log" 2>&1 || tail -n 5 "$small/prefill.log" &
wait
echo "compiled in $((SECONDS - started)) s"
rank --config glm-5.2-fp8 --rows 1,6,32,192 --context $contexts --prefill 8192 --sections --json "$out"
echo "all in $((SECONDS - started)) s"
