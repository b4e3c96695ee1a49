# SPDX-License-Identifier: Apache-2.0
"""What a rank refuses before it loads anything."""

from __future__ import annotations

import pytest
import torch

from glmserve.errors import ConfigError
from glmserve.runtime.rank import check_gpu


def test_a_gpu_that_the_kernels_are_not_made_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    with pytest.raises(ConfigError, match=r"device = 'cuda': .* 9\.0 .*NVIDIA A100 has 8\.0"):
        check_gpu(device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    check_gpu(device)
