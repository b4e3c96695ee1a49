# SPDX-License-Identifier: Apache-2.0
"""Dense prefill attention, and beside it what the sparse operators take for the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.registry import Case, Problem, arithmetic_us
from glmserve.kernels.dense_mla import reference
from glmserve.kernels.dense_mla.launch import dense_mla
from glmserve.kernels.quant import pack_latent_rows
from glmserve.kernels.query_side.kernel import absorb_query
from glmserve.kernels.rope.reference import rope_table
from glmserve.kernels.sparse_mla.launch import sparse_mla
from glmserve.kernels.value_up.kernel import value_up

HEADS, PAGES, SCALE = 8, 64, 256**-0.5
SHAPES = ((2048, 2048), (512, 2048), (512, 512))  # rows, context


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    query = torch.empty(512, HEADS, 256, dtype=torch.bfloat16, device=device)
    rope = torch.empty(512, 32, 2, device=device)
    kv_b = torch.empty(HEADS, 448, 512, dtype=torch.bfloat16, device=device)
    table = torch.empty(4, PAGES, dtype=torch.int32, device=device)
    for width, dtype in ((656, torch.uint8), (576, torch.bfloat16)):
        cache = torch.empty(PAGES * 64, width, dtype=dtype, device=device)
        yield (
            str(dtype),
            lambda c=cache: dense_mla(query, rope, c, table, 1, kv_b, 512, 0, SCALE),
        )


def problem(rows: int, context: int, dense: bool) -> Problem:
    torch.manual_seed(0)
    bf16 = torch.bfloat16
    query = torch.randn(rows, HEADS, 256, device="cuda").to(bf16)
    rope = rope_table(torch.arange(context - rows, context, device="cuda"), 64, 8e6, bf16)
    kv_b = (torch.randn(HEADS, 448, 512, device="cuda") * 0.05).to(bf16)
    latents = torch.randn(PAGES * 64, 576, device="cuda")
    cache = pack_latent_rows(latents[:, :512], latents[:, 512:])
    table = torch.randperm(PAGES, device="cuda").int().view(1, PAGES)
    place = torch.arange(context, device="cuda")
    slots = table[0].long()[place // 64] * 64 + place % 64
    last = torch.arange(context - rows, context, device="cuda")[:, None]
    slots = torch.where(place <= last, slots, -1).int()
    outs: dict[int, torch.Tensor] = {}

    def launch(i: int) -> None:
        if dense:
            outs[i] = dense_mla(query, rope, cache, table, 0, kv_b, context, 0, SCALE)
        else:
            absorbed = absorb_query(query, kv_b[:, :192], rope)
            latent = sparse_mla(absorbed, cache, slots, SCALE)
            outs[i] = value_up(latent, kv_b[:, 192:])

    def error() -> float:
        want = reference.dense_mla(
            query.float(), rope, cache, table, 0, kv_b.float(), context, 0, SCALE, 64, 192
        )
        return float((outs[0].float() - want).norm() / want.norm())

    return Problem(launch, 1, error, launches=6)


def cases() -> Iterator[Case]:
    torch.backends.cuda.matmul.allow_tf32 = False
    for rows, context in SHAPES:
        pairs = rows * context - rows * rows // 2
        flops = 2 * HEADS * (pairs * 512 + context * 448 * 512)
        for dense in (True, False):
            form = "dense" if dense else "absorbed over everything"
            yield Case(
                "dense_mla", f"{form}, fp8, {rows} rows of {context}",
                lambda r=rows, c=context, d=dense: problem(r, c, d),
                arithmetic_us(flops, 790), 1e-2,
            )  # fmt: skip
