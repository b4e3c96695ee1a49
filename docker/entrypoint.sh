#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Container entry point: looks at what usually goes wrong (shared memory, GPUs, checkpoint), says
# what it found on one line, removes what a killed predecessor left in /dev/shm, and becomes
# tritonserver. Arguments are passed on to tritonserver.
set -euo pipefail

shm=${SHM_DIR:-/dev/shm}             # tests point these two elsewhere
mounts=${MOUNTS_FILE:-/proc/mounts}
repository=${MODEL_REPOSITORY:-/opt/glmserve/model_repository}
checkpoint=${GLMSERVE_CHECKPOINT:-}
exit_timeout_s=${EXIT_TIMEOUT_S:-60} # docker/compose.yaml waits longer than this
shm_min_mib=1024

fail() {
    printf 'glmserve: %s\n' "$*" >&2
    exit 1
}

# NVLink multicast can take the GPUs of a shared host down; nobody may turn it on from outside.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1

[[ -f $checkpoint/config.json ]] ||
    fail "no checkpoint: mount one and set GLMSERVE_CHECKPOINT ('$checkpoint' has no config.json)"

shm_mib=$(df --block-size=1M --output=size "$shm" | tail -n 1 | tr -d ' ')
((shm_mib >= shm_min_mib)) ||
    fail "/dev/shm has $shm_mib MiB; the server and NCCL need $shm_min_mib or more (--shm-size=16g)"

gpus=0 driver=none
if command -v nvidia-smi >/dev/null; then
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
fi
ranks=${GLMSERVE_RANKS:-0}
if [[ ${GLMSERVE_DEVICE:-} != cpu ]]; then
    ((gpus > 0)) || fail "no GPU is visible (--gpus all); set GLMSERVE_DEVICE=cpu to run without"
    ((ranks <= gpus)) || fail "GLMSERVE_RANKS=$ranks but only $gpus GPUs are visible"
fi

# A container runtime mounts a container's own /dev/shm from a source called 'shm'; under
# --ipc=host it is the host's, where other servers' live regions may be.
stale=0
if [[ $(awk '$2 == "/dev/shm" { source = $1 } END { print source }' "$mounts") == shm ]]; then
    for region in "$shm"/triton_python_backend_shm_region_*; do
        [[ -e $region ]] || continue
        rm -f -- "$region"
        stale=$((stale + 1))
    done
fi

printf 'glmserve: %s GPUs, driver %s, /dev/shm %s MiB, %s stale regions removed, checkpoint %s\n' \
    "$gpus" "${driver:-unknown}" "$shm_mib" "$stale" "$checkpoint"

exec tritonserver \
    --model-repository="$repository" \
    --model-control-mode=explicit \
    --load-model=ensemble \
    --strict-readiness=true \
    --exit-timeout-secs="$exit_timeout_s" \
    --backend-config=python,shm-default-byte-size=16777216 \
    --backend-config=python,stub-timeout-seconds=1800 \
    --metrics-config=histogram_latencies=true \
    "$@"
