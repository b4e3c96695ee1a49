# SPDX-License-Identifier: Apache-2.0
"""The boundary between two blocks of a layer: all-reduce of partial sums + residual + RMSNorm.

One kernel over memory that the ranks' GPUs map into each other, without NVLink multicast. On CPU
and in groups without such memory, a group's own all-reduce is followed by `residual_norm`.
"""

from __future__ import annotations

from .reference import boundary as boundary_reference

__all__ = ["boundary_reference"]
