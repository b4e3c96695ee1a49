# SPDX-License-Identifier: Apache-2.0
"""How many programs of `score` there are, and how they see the cache."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...pdl import pdl
from .score import score

MOST_ROWS, MOST_GROUPS = 8, 256  # of one request that share its keys; of one launch
SMS = 132  # multiprocessors of an H200
_REGISTERS = {4: 64, 3: 80, 2: 128}  # a thread, where so many programs fit a multiprocessor
_KEYS = gluon.language.NVMMASharedLayout(128, 8, 2)
_LINE = gluon.language.NVMMASharedLayout(0, 32, 1)


def launch(
    query: torch.Tensor,
    head_weights: torch.Tensor,
    index_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_seq: torch.Tensor,
    last: torch.Tensor,
    group_pages: torch.Tensor | None,
    out: torch.Tensor,
    groups: int,
    group: int,
    first: int,
) -> None:
    """Fills out [R, width] for `groups` groups of `group` rows, each of one request where no
    `group_pages` are given."""
    keys = index_cache.view(-1).view(torch.float8_e4m3fn).view(-1, 128)
    scales = index_cache.view(-1).view(torch.float32)
    assert scales.numel() < 1 << 31, scales.shape  # places are 32 bits wide
    lines = query.view(-1, 128)
    columns = 32 if group == 1 else 64
    held = 4 if group <= 2 else 3 if group <= 6 else 2  # programs a multiprocessor has room for
    stages = 2 if group == 1 else 3  # of two pages for one row, else of one
    programs = SMS * held
    if group_pages is not None:
        programs *= 2  # groups of few pages cost more than their pages say
    elif 8 * (programs % groups) <= programs:
        programs -= programs % groups  # requests of one length begin with a program of their own
    score[(programs,)](
        TensorDescriptor(lines, list(lines.shape), [128, 1], [columns, 128], _KEYS),
        head_weights,
        TensorDescriptor(keys, list(keys.shape), [128, 1], [64, 128], _KEYS),
        TensorDescriptor(scales, list(scales.shape), [1], [64], _LINE),
        page_table, row_seq, last, last if group_pages is None else group_pages, out, len(query),
        groups, page_table.shape[1], out.shape[1], first, group, group_pages is None,
        MOST_GROUPS if group_pages is None else 1024, stages,
        num_warps=4, maxnreg=_REGISTERS[held], **pdl(),
    )  # fmt: skip
