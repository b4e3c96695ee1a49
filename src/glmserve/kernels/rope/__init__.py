# SPDX-License-Identifier: Apache-2.0
"""RoPE as formulas: the step's table is made by `step_inputs`, its use is part of other kernels."""
