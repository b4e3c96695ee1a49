# SPDX-License-Identifier: Apache-2.0
"""Routed experts of one rank: 32 whole ones of 256, or 256 slices of 256 columns; fp8, bf16, int4.

`experts` rows time the whole block (sort, quantisation, both products, SwiGLU, combine);
`expert_gemm` rows one grouped product on pairs that are sorted already: to 1536 tokens with what
follows it in the same launch (SwiGLU and quantisation, the weighted sum), and both as they run,
which is one launch and not the sum of its halves from 9 tokens on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from bench.registry import Case, Problem, arithmetic_us, memory_us
from glmserve.kernels.experts import (
    ExpertWeight,
    Int4Weight,
    fused_launch,
    launch,
    reference,
    stream_launch,
)
from glmserve.kernels.experts.pairs import empty_pairs
from glmserve.kernels.experts.reference import first_tensor
from glmserve.kernels.linear import QuantWeight
from glmserve.kernels.quantise import quantise

ALL, WIDTH, INNER, TOP_K = 256, 6144, 2048, 8
EP, SLICED = (32, INNER), (ALL, INNER // 8)  # (experts held, columns of each)
BYTES = {"fp8": 1.0, "bf16": 2.0, "int4 g32": 0.5625 + 0.015625, "int4 g128": 0.515625}
# SGLang's Triton kernel, (gate_up, down), us; DeepGEMM from 8192 tokens.
PEERS = {
    1: (20.8, 7.6),
    6: (30.9, 14.2),
    48: (151.0, 78.0),
    192: (194.0, 102.0),
    1024: (204.0, 115.0),
    4096: (373.0, 208.0),
    8192: (348.65, 182.79),
}
HIT = {1: 2, 6: 4}  # local experts hit where the peer was measured with a chosen routing


class Weights(NamedTuple):
    gate_up: ExpertWeight
    down: ExpertWeight


def make_weight(
    kind: str, experts: int, n: int, k: int, device: torch.device | str
) -> ExpertWeight:
    """Random numbers where the device has memory."""
    real = torch.device(device).type != "meta"
    if kind == "bf16":
        w = torch.empty(experts, n, k, dtype=torch.bfloat16, device=device)
        return w.normal_(0, k**-0.5) if real else w
    if kind == "fp8":
        values = torch.empty(experts, n, k, dtype=torch.uint8, device=device)
        scales = torch.empty(experts, -(-n // 128), k // 128, device=device)
        if real:
            for one in values:  # one expert at a time: the draw is four times as large
                one.copy_((torch.randn(n, k, device=device) * 60).clamp(-448, 448)
                          .to(torch.float8_e4m3fn).view(torch.uint8))  # fmt: skip
            scales.uniform_(0.5, 1.5).mul_(k**-0.5 / 60)
        return QuantWeight(values.view(torch.float8_e4m3fn), scales)
    group = int(kind.rpartition("g")[2])
    packed = torch.empty(experts, n, k // 8, dtype=torch.int32, device=device)
    scales = torch.empty(experts, n, k // group, dtype=torch.bfloat16, device=device)
    zeros = None
    if group == 32:
        zeros = torch.empty(experts, n // 8, k // group, dtype=torch.int32, device=device)
    if real:
        packed.random_(-(1 << 31), (1 << 31) - 1)
        scales.uniform_(0.5, 1.5).mul_(k**-0.5 / 5)
        if zeros is not None:
            zeros.random_(-(1 << 31), (1 << 31) - 1)
    return Int4Weight(packed, scales, zeros)


_made: dict[object, Weights] = {}


def weights_of(kind: str, layout: tuple[int, int]) -> Weights:
    """One set at a time stays on the card."""
    if (kind, layout) not in _made:
        _made.clear()
        torch.manual_seed(1)
        experts, inner = layout
        _made[kind, layout] = Weights(
            make_weight(kind, experts, 2 * inner, WIDTH, "cuda"),
            make_weight(kind, experts, WIDTH, inner, "cuda"),
        )
    return _made[kind, layout]


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    for kind in BYTES:
        for layout in (EP, SLICED):
            experts, inner = layout
            up = make_weight(kind, experts, 2 * inner, WIDTH, device)
            down = make_weight(kind, experts, WIDTH, inner, device)
            for rows in (1, 192, 512, 1024, 4096):
                x = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device=device)
                ids = torch.empty(rows, TOP_K, dtype=torch.int64, device=device)
                shares = torch.empty(rows, TOP_K, dtype=torch.float32, device=device)

                def call(x=x, ids=ids, shares=shares, up=up, down=down):  # type: ignore[no-untyped-def]
                    return launch.experts(x, ids, shares, up, down, 0, x)

                yield f"{kind} {experts} experts {rows} rows", call
    up, down, *shared = (
        QuantWeight(
            torch.empty(*lead, n, k, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(*lead, n // 128, k // 128, device=device),
        )
        for lead, n, k in (
            ((32,), 2 * INNER, WIDTH), ((32,), WIDTH, INNER), ((), INNER // 4, WIDTH),
            ((), WIDTH, INNER // 8),
        )
    )  # fmt: skip
    for rows in (1, 32, 192, 1024):
        tile = fused_launch.block_rows(rows, (up, down, *shared))
        pairs = empty_pairs(rows * TOP_K, 32, tile, device)
        quantised = quantise(torch.empty(rows, WIDTH, dtype=torch.bfloat16, device=device))
        shares = torch.empty(rows, TOP_K, dtype=torch.float32, device=device)

        def whole(x=quantised, shares=shares, pairs=pairs):  # type: ignore[no-untyped-def]
            return fused_launch.experts(x, shares, pairs, up, down, (shared[0], shared[1]))

        yield f"fused with a shared expert, {rows} rows", whole


def routing(rows: int, sets: int, hit: int | None) -> list[torch.Tensor]:
    """Uniform choices; with `hit`, that many local experts (of 32) in all, others for each set."""
    choices = []
    for i in range(sets):
        if hit is None:
            ids = torch.rand(rows, ALL, device="cuda").topk(TOP_K, dim=1).indices
        else:
            ids = torch.arange(32, 32 + rows * TOP_K, device="cuda").view(rows, TOP_K)
            local = (torch.arange(hit, device="cuda") + i * hit) % 32
            if rows == 1:
                ids[0, :hit] = local
            else:
                ids[:hit, 0] = local
        choices.append(ids.sort(1).values)
    return choices


def expected(rows: int, layout: tuple[int, int]) -> tuple[int, int]:
    """(experts hit, pairs) of this rank: as chosen, else the mean of uniform choices."""
    held = layout[0]
    if layout == EP and rows in HIT:
        return HIT[rows], HIT[rows]
    hit = held * (1 - (1 - TOP_K / ALL) ** rows)
    return round(hit), rows * TOP_K * held // ALL


def floor_us(kind: str, hit: int, pairs: int, n: int, k: int) -> float:
    moved = hit * n * k * BYTES[kind] + pairs * (k + 2 * n)
    rate = 1580 if kind == "fp8" else 790
    return max(memory_us(moved), arithmetic_us(2 * pairs * n * k, rate))


def block_problem(kind: str, layout: tuple[int, int], rows: int) -> Problem:
    up, down = weights_of(kind, layout)
    torch.manual_seed(2)
    sets = 16 if rows <= 48 else 2
    x = torch.randn(rows, WIDTH, device="cuda")
    x[:, 11] *= 50
    x, shared = x.bfloat16(), torch.randn(rows, WIDTH, device="cuda").bfloat16()
    choices = routing(rows, sets, HIT.get(rows) if layout == EP else None)
    shares = torch.rand(rows, TOP_K, device="cuda") * 0.6
    want = reference.experts(x, choices[0], shares, up, down, 0, shared).float() - shared.float()
    outs: dict[int, torch.Tensor] = {}

    def launch_(i: int) -> None:
        outs[i] = launch.experts(x, choices[i], shares, up, down, 0, shared)

    def error() -> float:
        return float((outs[0].float() - shared.float() - want).norm() / want.norm())

    def exact() -> bool:
        one = slice(rows - 1, rows)
        alone = launch.experts(x[one], choices[0][one], shares[one], up, down, 0, shared[one])
        return torch.equal(alone, outs[0][one])

    return Problem(launch_, sets, error, launches=16 if rows <= 192 else 4, exact=exact)


def gemm_problem(rows: int, which: int) -> Problem:
    """which: gate_up, down or both."""
    up, down = weights_of("fp8", EP)
    weight = (up, down, up)[which]
    torch.manual_seed(2)
    sets = 16 if rows <= 48 else 2
    choices = routing(rows, sets, HIT.get(rows))
    depth = first_tensor(weight).shape[2]
    fused = rows <= fused_launch.MOST_ROWS
    top_k = TOP_K if which != 1 else 0
    one_launch = fused and fused_launch.streams(rows, (up, down))
    shape = (rows, WIDTH) if one_launch or top_k else (rows * TOP_K, depth)
    x = quantise(torch.randn(shape, device="cuda").bfloat16())
    tile = fused_launch.block_rows(rows, (up, down)) if fused else launch.many_rows(x.values)
    sorted_pairs = [launch.sort_pairs(ids, 0, EP[0], tile) for ids in choices]
    outs: dict[int, object] = {}
    shares = torch.rand(rows, TOP_K, device="cuda")
    shared = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    halves = (which == 0, which == 1)

    def run(i: int) -> None:
        assert isinstance(up, QuantWeight)
        assert isinstance(down, QuantWeight)
        assert isinstance(weight, QuantWeight)
        pairs = sorted_pairs[i]
        if not fused:
            outs[i] = launch.grouped_linear(x, weight, pairs, top_k)
        elif which == 2:
            outs[i] = fused_launch.experts(x, shares, pairs, up, down, shared)
        elif one_launch:
            outs[i] = stream_launch.experts(x, shares, pairs, up, down, shared, halves)
        elif which == 0:
            outs[i] = fused_launch.activated(x, pairs, top_k, up, shared)
        else:
            outs[i] = fused_launch.combined(x, x, pairs, shares, down, shared)

    return Problem(run, sets, lambda: 0.0, launches=16 if rows <= 192 else 4)


def cases() -> Iterator[Case]:
    for rows in (1, 6, 48, 192, 1024, 4096, 8192):
        hit, pairs = expected(rows, EP)
        products = (("gate_up", 4096, 6144), ("down", 6144, 2048))
        for which, (name, n, k) in enumerate(products):
            yield Case(
                "expert_gemm",
                f"fp8 {name}, 32 of 256 experts, {rows} tokens ({hit} hit)",
                lambda rows=rows, which=which: gemm_problem(rows, which),
                floor_us("fp8", hit, pairs, n, k),
                0.0,  # what is computed is checked by the whole block's rows
                PEERS[rows][which],
                None,
                {"peer_is": "the product alone"} if rows <= fused_launch.MOST_ROWS else {},
            )
        if rows <= fused_launch.MOST_ROWS:
            yield Case(
                "expert_gemm",
                f"fp8 gate_up and down, 32 of 256 experts, {rows} tokens ({hit} hit)",
                lambda rows=rows: gemm_problem(rows, 2),
                sum(floor_us("fp8", hit, pairs, n, k) for _, n, k in products),
                0.0,
                round(sum(PEERS[rows]), 2),
                None,
                {"peer_is": "both products alone"},
            )
    table = [("fp8", EP, (1, 6, 32, 192, 1024, 4096, 8192)), ("fp8", SLICED, (1, 6, 32, 192, 8192))]
    table += [("bf16", EP, (1, 32, 192, 4096))]
    table += [(kind, EP, (1, 6, 32, 192, 1024)) for kind in ("int4 g32", "int4 g128")]
    for kind, layout, sizes in table:
        for rows in sizes:
            hit, pairs = expected(rows, layout)
            up, down = (2 * layout[1], WIDTH), (WIDTH, layout[1])
            floor = sum(floor_us(kind, hit, pairs, n, k) for n, k in (up, down))
            name = "32 of 256 experts" if layout == EP else "256 slices"
            compared = kind == "fp8" and layout == EP
            target = {1: 38.0, 6: 55.0}.get(rows) if compared else None
            peer = round(sum(PEERS[rows]), 2) if compared and rows in PEERS else None
            yield Case(
                "experts",
                f"{kind}, {name}, {rows} tokens ({hit} hit)",
                lambda kind=kind, layout=layout, rows=rows: block_problem(kind, layout, rows),
                floor,
                2e-2,
                peer,
                target,
                {"peer_is": "both products alone"} if compared else {},
            )
