# SPDX-License-Identifier: Apache-2.0
"""How much memory a GPU has to give, as the driver's own tool says; CUDA is not touched."""

from __future__ import annotations

import subprocess

from glmserve.config import EngineConfig
from glmserve.errors import ConfigError
from glmserve.parallel.launcher import visible_device

_QUERY = ("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits")


def gpu_memory(config: EngineConfig) -> float:
    """Bytes that every rank may use: the setting, else the least that a rank's GPU has free. Raises
    ConfigError when nobody says."""
    if config.gpu_memory_gb:
        return config.gpu_memory_gb * 1e9
    devices = ",".join(visible_device(config, rank) for rank in range(config.ranks))
    try:
        done = subprocess.run(
            [*_QUERY, f"--id={devices}"], capture_output=True, text=True, timeout=60, check=True
        )
        return min(float(line) * 2**20 for line in done.stdout.split())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = f"set it: nvidia-smi does not tell what devices {devices} have ({error})"
        raise ConfigError("gpu_memory_gb", 0, reason) from None
