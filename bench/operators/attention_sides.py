# SPDX-License-Identifier: Apache-2.0
"""The small operators around sparse attention: cache writes, query side, value-up, slots, step
inputs, taken rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.registry import Case, Problem, memory_us
from glmserve.kernels.latent_inputs import reference as inputs_reference
from glmserve.kernels.latent_inputs.kernel import latent_inputs
from glmserve.kernels.latent_inputs.reference import IndexKeyNorm
from glmserve.kernels.quant import quantise_index, read_index_pages, unpack_latent_rows
from glmserve.kernels.quantise import QuantRows, dequantise, quantise
from glmserve.kernels.query_side import reference as query_reference
from glmserve.kernels.query_side.kernel import absorb_query, index_query
from glmserve.kernels.residual_norm import Normed
from glmserve.kernels.rope import reference as rope_reference
from glmserve.kernels.slot_lookup import reference as slot_reference
from glmserve.kernels.slot_lookup.kernel import slot_lookup
from glmserve.kernels.step_inputs import reference as step_reference
from glmserve.kernels.step_inputs.kernel import step_inputs
from glmserve.kernels.take_rows.kernel import take_rows
from glmserve.kernels.value_up import kernel as value_kernel
from glmserve.kernels.value_up import value_up, value_up_quantised

HEADS, WIDTH, SLOTS = 8, 2048 + 576 + 160, 1 << 15
ROWS = (1, 6, 32, 192, 8192)


def target(rows: int) -> float | None:
    return 3.0 if rows <= 32 else 6.0 if rows <= 192 else None


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    bf16 = torch.bfloat16
    norm = torch.empty(2048, dtype=bf16, device=device)
    index_norm = IndexKeyNorm(norm[:128], norm[:128])
    for rows in (6, 32, 192, 8192):
        rope = torch.empty(rows, 32, 2, device=device)
        long = torch.empty(rows, dtype=torch.int64, device=device)
        table = torch.empty(4, 256, dtype=torch.int32, device=device)
        yield "step_inputs", lambda p=long, t=table: step_inputs(p, p, t, 64, 0, 1, 64, 8e6)
        kv_b = torch.empty(HEADS, 448, 512, dtype=bf16, device=device)
        query = torch.empty(rows, HEADS, 256, dtype=bf16, device=device)
        latent = torch.empty(rows, HEADS, 512, dtype=bf16, device=device)
        yield "absorb", lambda q=query, w=kv_b, r=rope: absorb_query(q, w[:, :192], r)
        yield "value_up", lambda x=latent, w=kv_b: value_kernel.value_up(x, w[:, 192:])
        yield (
            "value_up fp8",
            lambda x=latent, w=kv_b: value_kernel.value_up_quantised(x, w[:, 192:]),
        )
        index = torch.empty(rows, 32, 128, dtype=bf16, device=device)
        apart = torch.empty(8, rows, 160, device=device)  # the index projection in parts
        weights = apart[:, :, -32:]
        projected = torch.empty(rows, WIDTH, dtype=bf16, device=device)
        for fp8 in (True, False):
            yield "index_query", lambda q=index, w=weights, r=rope, f=fp8: index_query(q, w, r, f)
            byte = torch.uint8 if fp8 else bf16
            cache = torch.empty(SLOTS, 656 if fp8 else 576, dtype=byte, device=device)
            keys = torch.empty(SLOTS, 132 if fp8 else 128, dtype=byte, device=device)
            for own, quantised in ((keys, False), (None, False), (keys, True), (None, True)):
                if fp8 or not quantised:  # block-fp8 weights come with fp8 caches
                    yield (
                        "latent_inputs",
                        lambda x=projected, r=rope, s=long, c=cache, k=own, q=quantised, p=apart: (
                            latent_inputs(
                                x, norm, norm[:512], r, s, c, k,
                                index_norm if k is not None else None, 1e-5, p, q,
                            )
                        ),
                    )  # fmt: skip
    table = torch.empty(4, 256, dtype=torch.int32, device=device)
    positions = torch.empty(6, 2048, dtype=torch.int32, device=device)
    rows = torch.empty(6, dtype=torch.int64, device=device)
    yield "slot_lookup", lambda: slot_lookup(positions, table, rows, 64)
    for x in (positions, positions[:, :2].contiguous().view(torch.int64)):
        yield "take_rows", lambda x=x: take_rows(x, rows)


def sets_for(bytes_: int) -> int:
    return max(2, min(60, int(2.2e8 // bytes_) + 1))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def writes(rows: int, fp8: bool) -> Problem:
    torch.manual_seed(0)
    bf16 = torch.bfloat16
    sets = sets_for(rows * WIDTH * 2)
    projected = [torch.randn(rows, WIDTH, device="cuda").to(bf16) for _ in range(sets)]
    projected[0][0] *= 50
    q_norm, kv_norm = (
        torch.rand(2048, device="cuda").to(bf16),
        torch.rand(512, device="cuda").to(bf16),
    )
    norm = IndexKeyNorm(
        torch.rand(128, device="cuda").to(bf16), torch.rand(128, device="cuda").to(bf16)
    )
    rope = rope_reference.rope_table(
        torch.randint(0, 1 << 20, (rows,), device="cuda"), 64, 8e6, torch.float32
    )
    slots = [torch.randperm(SLOTS, device="cuda")[:rows] for _ in range(sets)]
    byte = torch.uint8 if fp8 else bf16
    cache = torch.zeros(SLOTS, 656 if fp8 else 576, dtype=byte, device="cuda")
    keys = torch.zeros(SLOTS, 132 if fp8 else 128, dtype=byte, device="cuda")
    wide, wide_keys = torch.zeros(SLOTS, 576, device="cuda"), torch.zeros(SLOTS, 128, device="cuda")
    want = inputs_reference.latent_inputs(
        projected[0].float(), q_norm.float(), kv_norm.float(), rope, slots[0], wide, wide_keys,
        IndexKeyNorm(norm.weight.float(), norm.bias.float()), 1e-5,
    )  # fmt: skip
    outs: dict[int, Normed] = {}

    def launch(i: int) -> None:
        outs[i] = latent_inputs(
            projected[i], q_norm, kv_norm, rope, slots[i], cache, keys, norm, 1e-5, quantised=fp8
        )

    def error() -> float:
        launch(0)  # other input sets wrote to the same caches since
        rows_now = cache[slots[0]]
        stored = unpack_latent_rows(rows_now) if fp8 else rows_now.float()
        pages = torch.arange(SLOTS // 64, device="cuda")
        index = read_index_pages(keys, pages).flatten(0, 1) if fp8 else keys.float()
        # Quantisation's own error is 2.6%; what exceeds it counts.
        allowed = 0.028 if fp8 else 0.0
        found = max(
            relative(stored, wide[slots[0]]), relative(index[slots[0]], wide_keys[slots[0]])
        )
        return max(relative(outs[0].rows, want), found - allowed)

    def exact() -> bool:
        q_latent, quantised = outs[0]
        return quantised is None or same_rows(quantised, quantise(q_latent))

    return Problem(launch, sets, error, exact=exact)


def same_rows(got: QuantRows, want: QuantRows) -> bool:
    """Bit for bit, -0 and 0 being one value."""
    return torch.equal(got.scales, want.scales) and torch.equal(
        got.values.float(), want.values.float()
    )


def absorption(rows: int, up: bool, fp8: bool = False) -> Problem:
    torch.manual_seed(0)
    bf16 = torch.bfloat16
    sets = sets_for(HEADS * 448 * 512 * 2 + rows * HEADS * 832 * 2)
    kv_b = [(torch.randn(HEADS, 448, 512, device="cuda") * 0.05).to(bf16) for _ in range(sets)]
    query = torch.randn(rows, HEADS, 256, device="cuda").to(bf16)
    latent = torch.randn(rows, HEADS, 512, device="cuda").to(bf16)
    rope = rope_reference.rope_table(torch.arange(rows, device="cuda"), 64, 8e6, torch.float32)
    outs: dict[int, torch.Tensor | QuantRows] = {}

    def run(i: int, some: slice) -> torch.Tensor | QuantRows:
        w = kv_b[i]
        if fp8:
            return value_up_quantised(latent[some], w[:, 192:])
        if up:
            return value_up(latent[some], w[:, 192:])
        return absorb_query(query[some], w[:, :192], rope[some])

    def launch(i: int) -> None:
        outs[i] = run(i, slice(0, rows))

    def error() -> float:
        w = kv_b[0].float()
        got = dequantise(outs[0]) if isinstance(outs[0], QuantRows) else outs[0]
        if up:
            return relative(
                got, torch.einsum("rhc,hvc->rhv", latent.float(), w[:, 192:]).flatten(1)
            )
        return relative(got, query_reference.absorb_query(query.float(), w[:, :192], rope))

    def exact() -> bool:
        """The last row alone has the same bits; in fp8 those of the rounded values."""
        got, alone = outs[0], run(0, slice(rows - 1, rows))
        if isinstance(got, QuantRows):
            assert isinstance(alone, QuantRows)
            last = QuantRows(got.values[-1:], got.scales[:, -1:])
            plain = quantise(value_up(latent, kv_b[0][:, 192:]))
            return same_rows(last, alone) and same_rows(got, plain)
        assert isinstance(alone, torch.Tensor)
        return torch.equal(got[-1:], alone)

    return Problem(launch, sets, error, exact=exact)


def index_queries(rows: int) -> Problem:
    torch.manual_seed(0)
    sets = sets_for(rows * 32 * 128 * 3)
    queries = [torch.randn(rows, 32, 128, device="cuda").bfloat16() for _ in range(sets)]
    weights = torch.randn(8, rows, 160, device="cuda")[:, :, 128:]
    rope = rope_reference.rope_table(torch.arange(rows, device="cuda"), 64, 8e6, torch.float32)
    wide, scaled = query_reference.index_query(
        queries[0].float(), weights.sum(0, keepdim=True), rope
    )
    values, scale = quantise_index(wide)
    outs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def launch(i: int) -> None:
        outs[i] = index_query(queries[i], weights, rope, True)

    def error() -> float:
        return max(relative(outs[0][0], values), relative(outs[0][1], scaled * scale))

    return Problem(launch, sets, error)


def lookups(rows: int) -> Problem:
    torch.manual_seed(0)
    table = torch.randperm(32 * 1600, device="cuda").int().view(32, 1600)
    row_seq = torch.arange(rows, device="cuda") % 32
    sets = sets_for(rows * 2048 * 8)
    positions = [
        torch.randint(0, 102400, (rows, 2048), device="cuda", dtype=torch.int32).sort().values
        for _ in range(sets)
    ]
    outs: dict[int, torch.Tensor] = {}

    def launch(i: int) -> None:
        outs[i] = slot_lookup(positions[i], table, row_seq, 64)

    def error() -> float:
        want = slot_reference.slot_lookup(positions[0], table, row_seq, 64)
        return float((outs[0] != want).float().mean())

    return Problem(launch, sets, error)


def steps(rows: int) -> Problem:
    torch.manual_seed(0)
    positions = torch.randint(0, 102_400, (rows,), device="cuda")
    lines = torch.arange(rows, device="cuda") % 32
    table = torch.randperm(32 * 1601, device="cuda").int().view(32, 1601)
    outs: dict[int, step_reference.StepInputs] = {}

    def launch(i: int) -> None:
        outs[i] = step_inputs(positions, lines, table, 64, 1, 1, 64, 8e6)

    def error() -> float:
        want = step_reference.step_inputs(positions, lines, table, 64, 1, 1, 64, 8e6, torch.float32)
        got = outs[0]
        same = torch.equal(got.last, want.last) and torch.equal(got.own_slots, want.own_slots.int())
        return float((got.rope - want.rope).abs().max()) if same else float("inf")

    return Problem(launch, 1, error)


def taken(rows: int) -> Problem:
    torch.manual_seed(0)
    sets = sets_for(rows * 6144 * 2 * 6)
    hidden = [torch.randn(6 * rows, 6144, device="cuda").bfloat16() for _ in range(sets)]
    index = torch.randperm(6 * rows, device="cuda")[:rows]
    outs: dict[int, torch.Tensor] = {}

    def launch(i: int) -> None:
        outs[i] = take_rows(hidden[i], index)

    return Problem(launch, sets, lambda: float((outs[0] != hidden[0][index]).float().mean()))


def cases() -> Iterator[Case]:
    torch.backends.cuda.matmul.allow_tf32 = False
    for rows in ROWS:
        name = f"{rows} rows"
        read = rows * WIDTH * 2 + rows * 4096
        for fp8, size in ((True, 788), (False, 1408)):
            yield Case(
                "latent_inputs", f"{'fp8' if fp8 else 'bf16'} {name}",
                lambda r=rows, f=fp8: writes(r, f), memory_us(read + rows * size), 6e-3, None,
                target(rows),
            )  # fmt: skip
        yield Case(
            "query_side", f"absorb {name}", lambda r=rows: absorption(r, False),
            memory_us(HEADS * 192 * 1024 + rows * HEADS * 832 * 2), 6e-3, None, target(rows),
        )  # fmt: skip
        yield Case(
            "value_up", name, lambda r=rows: absorption(r, True),
            memory_us(HEADS * 256 * 1024 + rows * HEADS * 768 * 2), 6e-3, None, target(rows),
        )  # fmt: skip
        yield Case(
            "value_up", f"fp8 {name}", lambda r=rows: absorption(r, True, True),
            memory_us(HEADS * 256 * 1024 + rows * HEADS * (512 * 2 + 256)), 3e-2, None,
            target(rows),
        )  # fmt: skip
        yield Case(
            "query_side", f"index query fp8 {name}", lambda r=rows: index_queries(r),
            memory_us(rows * 32 * 128 * 3), 3e-3, None, target(rows),
        )  # fmt: skip
        if rows <= 192:
            yield Case(
                "slot_lookup", name, lambda r=rows: lookups(r), memory_us(rows * 2048 * 8), 0.0,
                None, target(rows),
            )  # fmt: skip
            yield Case("step_inputs", name, lambda r=rows: steps(r), None, 1e-5, None, target(rows))
            yield Case(
                "take_rows", f"6144, {name}", lambda r=rows: taken(r), memory_us(rows * 6144 * 4),
                0.0, None, target(rows),
            )  # fmt: skip
