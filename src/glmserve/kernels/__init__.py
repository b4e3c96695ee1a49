# SPDX-License-Identifier: Apache-2.0
"""GPU operators, one folder each: `reference.py` says the formula in plain torch, `__init__.py`
checks the arguments and dispatches. This package imports nothing of the project and knows no
ranks, layers or sequences: what an operator needs comes in as tensors.

Shared words: R packed rows of one step, H heads of this rank, S sequences, P logical pages,
"slot" a physical cache row (page * page_size + offset). "acc" is the dtype of statistics, softmax,
scores and router: fp32, or fp64 when the model runs in fp64.
"""
