# SPDX-License-Identifier: Apache-2.0
"""The attention side in a row, kernel feeding kernel: what one writes the next can read."""

from __future__ import annotations

import pytest
import torch

from glmserve.kernels.index_logits import reference as logits_reference
from glmserve.kernels.index_logits.kernel import index_logits
from glmserve.kernels.latent_inputs import reference as inputs_reference
from glmserve.kernels.latent_inputs.kernel import latent_inputs
from glmserve.kernels.latent_inputs.reference import IndexKeyNorm
from glmserve.kernels.query_side import reference as query_reference
from glmserve.kernels.query_side.kernel import absorb_query, index_query
from glmserve.kernels.slot_lookup import reference as slot_reference
from glmserve.kernels.slot_lookup.kernel import slot_lookup
from glmserve.kernels.sparse_mla import reference as mla_reference
from glmserve.kernels.sparse_mla.launch import sparse_mla
from glmserve.kernels.step_inputs.kernel import step_inputs
from glmserve.kernels.topk_select.launch import topk_select
from glmserve.kernels.value_up import reference as value_reference
from glmserve.kernels.value_up.kernel import value_up

CONTEXTS, ROWS, HEADS, K, Q = (70, 20), 2, 8, 16, 256
PAGES, PER = 5, 2


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_kernels_in_a_row_match_wide_references_in_a_row(device: torch.device, fp8: bool) -> None:
    bf16 = torch.bfloat16

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=device) * scale).to(bf16)

    table = torch.randperm(PAGES, device=device, dtype=torch.int32)[: 2 * PER].view(2, PER)
    positions = torch.cat([torch.arange(n, device=device) for n in CONTEXTS])
    row_seq = torch.arange(2, device=device).repeat_interleave(torch.tensor(CONTEXTS).to(device))
    projected = random(len(positions), Q + 576 + 160)
    q_norm, kv_norm = 1 + random(Q, scale=0.1), 1 + random(512, scale=0.1)
    norm = IndexKeyNorm(1 + random(128, scale=0.1), random(128, scale=0.1))
    kv_b = random(HEADS, 448, 512, scale=0.03)
    q_b, wq_b = random(HEADS * 256, Q, scale=0.1), random(32 * 128, Q, scale=0.1)
    mine = torch.cat([(row_seq == s).nonzero()[-ROWS:, 0] for s in range(2)])

    # Kernels: every position is written, then the last rows of each sequence attend.
    rope, last, own = step_inputs(positions, row_seq, table, 64, 0, 0, 64, 8e6)
    shapes = (656, 132) if fp8 else (576, 128)
    latent, index = (
        torch.zeros(PAGES * 64, n, dtype=torch.uint8 if fp8 else bf16, device=device)
        for n in shapes
    )
    cq = latent_inputs(projected, q_norm, kv_norm, rope, own, latent, index, norm, 1e-5)
    cq = cq.rows[mine]
    heads = (cq.float() @ wq_b.float().T).to(bf16).view(-1, 32, 128)
    weights = projected[mine, Q + 576 + 128 :]
    iq, iw = index_query(heads, weights[None], rope[mine], fp8)
    last, seq = last[mine], row_seq[mine]
    context = PER * 64
    scores = index_logits(iq, iw, index, table, seq, last, 0, context, ROWS, False)
    chosen = topk_select(scores, K, last, 0)
    slots = slot_lookup(chosen, table, seq, 64)
    query = (cq.float() @ q_b.float().T).to(bf16).view(-1, HEADS, 256)
    absorbed = absorb_query(query, kv_b[:, :192], rope[mine])
    got = value_up(sparse_mla(absorbed, latent, slots, 256**-0.5), kv_b[:, 192:])

    # References in fp32 on their own caches, from the same inputs.
    wide, wide_index = (torch.zeros(PAGES * 64, n, device=device) for n in (576, 128))
    slots_own = slot_reference.slot_lookup(positions[:, None], table, row_seq, 64)[:, 0]
    cq = inputs_reference.latent_inputs(
        projected.float(), q_norm.float(), kv_norm.float(), rope, slots_own, wide, wide_index,
        IndexKeyNorm(norm.weight.float(), norm.bias.float()), 1e-5,
    )[mine]  # fmt: skip
    heads = (cq @ wq_b.float().T).view(-1, 32, 128)
    iq, iw = query_reference.index_query(heads, weights.float()[None], rope[mine])
    want_scores = logits_reference.index_logits(
        iq, iw, wide_index, table, seq, last, 0, 64, context
    )
    best = [set(row.topk(K).indices.tolist()) for row in want_scores]
    found = sum(len(best[r] & set(chosen[r].tolist())) for r in range(len(mine)))
    assert found >= 0.9 * K * len(mine)  # quantised scores may swap what is nearly tied
    query = (cq @ q_b.float().T).view(-1, HEADS, 256)
    absorbed = query_reference.absorb_query(query, kv_b[:, :192].float(), rope[mine])
    out = mla_reference.sparse_mla(absorbed, wide, slots.long(), 512, 256**-0.5)
    want = value_reference.value_up(out, kv_b[:, 192:].float())
    assert (got.float() - want).norm() < (0.04 if fp8 else 0.01) * want.norm()
