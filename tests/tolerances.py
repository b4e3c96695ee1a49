# SPDX-License-Identifier: Apache-2.0
"""Every numeric tolerance of the tests, in one place. Loosening one needs its reason in the commit.

A tolerance is (absolute, relative): |got - reference| <= absolute + relative * |reference|.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

TOLERANCES: dict[str, tuple[float, float]] = {
    # End to end against transformers in fp32: sums are ordered differently in every layer.
    "golden_logits_fp32": (2e-4, 0.0),
    "golden_hidden_fp32": (5e-4, 0.0),
    "golden_router_weights_fp32": (5e-5, 0.0),
    # One operator against its naive formula, in the dtype that it runs in.
    "operator_fp64": (1e-12, 1e-12),
    "operator_fp32": (2e-5, 2e-5),
    "operator_bf16": (2e-2, 2e-2),
    # fp8 rounds the rows of the second product: one flipped code moves a sum by 1/28 of a term,
    # and the tests' outlier rows make terms of size 2.
    "operator_quantised": (8e-2, 2e-2),
    # A whole forward with the golden's choices: relative distance of a row of hidden states or
    # logits (the golden is stored in fp16). The reference operators reach 3e-4, 0.022 and 0.16; a
    # wrong selection gives 0.8.
    "forward_fp32": (1e-3, 0.0),
    "forward_bf16": (3e-2, 0.0),
    "forward_fp8": (0.2, 0.0),
    # The same fp64 computation with sums split otherwise (ranks, chunks, batches), end to end.
    "same_fp64": (1e-9, 1e-9),
}


def assert_close(name: str, reference: Any, got: Any, key: str) -> None:
    """Fails with the worst absolute and relative error of `name` unless within TOLERANCES[key]."""
    ref, value = _wide(reference), _wide(got)
    assert ref.shape == value.shape, f"{name}: shape {value.shape}, reference {ref.shape}"
    absolute, relative = TOLERANCES[key]
    same = (ref == value) | (np.isnan(ref) & np.isnan(value))  # infinities compare equal here
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(value - ref))
    allowed = absolute + relative * np.where(np.isfinite(ref), np.abs(ref), 0.0)
    if not (error <= allowed).all():
        worst = np.unravel_index(
            np.nanargmax(np.nan_to_num(error - allowed, nan=np.inf)), ref.shape
        )
        at = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{name}: worst error {error[at]:.3e} at {at} (reference {ref[at]:.6g}, got "
            f"{value[at]:.6g}), allowed {allowed[at]:.3e} by {key}; "
            f"{int((~(error <= allowed)).sum())} of {ref.size} elements are off"
        )


def _wide(x: Any) -> np.ndarray[Any, Any]:
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().double().numpy()
    return np.asarray(x, dtype=np.float64)
