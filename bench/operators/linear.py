# SPDX-License-Identifier: Apache-2.0
"""Dense products of one rank of TP8: block-fp8 projections, bf16 projections, the head's shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.registry import Case, Problem, arithmetic_us, memory_us
from glmserve.kernels.linear import QuantWeight, dequantise_weight
from glmserve.kernels.linear.launch import linear
from glmserve.kernels.linear.parts import linear_parts
from glmserve.kernels.linear.reference import added
from glmserve.kernels.quantise import QuantRows, dequantise, quantise
from glmserve.kernels.quantise.launch import empty_rows

# (outputs, inputs): qkv_a, o_proj, dense gate_up | down, q_b, index wq_b, shared gate_up | down.
FP8 = (
    (2624, 6144),
    (6144, 2048),
    (3072, 6144),
    (6144, 1536),
    (2048, 2048),
    (4096, 2048),
    (512, 6144),
    (6144, 256),
)
INDEX = (160, 6144)  # wk + weights_proj; few rows' K chunks are left apart
BF16 = (INDEX, (6144, 1536))  # .., eh_proj
HEAD = (19360, 6144)
ROWS = (1, 6, 32, 192, 8192)
# DeepGEMM, then SGLang's Triton kernel: microseconds at ROWS.
PEERS = {
    (3072, 6144): ((12.24, 10.74, 10.96, 14.97, 239.6), (10.91, 10.19, 11.88, 26.41, 417.7)),
    (6144, 2048): ((7.22, 6.93, 6.96, 9.89, 156.3), (8.65, 8.36, 10.32, 15.41, 301.7)),
    (6144, 1536): ((5.97, 5.76, 5.87, 8.37, 120.9), ()),
    (2048, 2048): ((5.1, 4.63, 4.71, 4.96, 54.4), (5.54, 5.26, 6.1, 8.71, 102.8)),
    (4096, 2048): ((5.98, 5.57, 5.71, 6.9, 104.6), (6.62, 6.7, 8.47, 11.24, 205.4)),
    (512, 6144): ((8.93, 8.88, 9.08, 8.26, 40.3), ()),
    (6144, 256): ((3.38, 3.24, 2.93, 4.02, 37.7), ()),
}
TARGETS = {(3072, 6144): 8.5, (6144, 2048): 6.0, (2624, 6144): 7.6}


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    for rows in (1, 17, 64, 128, 192, 8192):
        for n, k in FP8:
            x, w = empty_rows(rows, k, device), _empty_weight(n, k, device)
            yield f"fp8 {rows} {n} {k}", lambda x=x, w=w: linear(x, w, torch.bfloat16)
        for n, k in (*BF16, HEAD):
            x = torch.empty(rows, k, dtype=torch.bfloat16, device=device)
            w = torch.empty(n, k, dtype=torch.bfloat16, device=device)
            dtype = torch.float32 if n == HEAD[0] else torch.bfloat16
            if (n, k) == INDEX:
                yield f"bf16 {rows} {n} {k}", lambda x=x, w=w: linear_parts(x, w)
            else:
                yield f"bf16 {rows} {n} {k}", lambda x=x, w=w, d=dtype: linear(x, w, d)


def _empty_weight(n: int, k: int, device: torch.device) -> QuantWeight:
    return QuantWeight(
        torch.empty(n, k, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(-(-n // 128), k // 128, dtype=torch.float32, device=device),
    )


def random_weight(n: int, k: int) -> QuantWeight:
    """Values over the whole e4m3 range, scales that differ by block; one block a thousand times."""
    values = (torch.randn(n, k, device="cuda") * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-n // 128), k // 128, device="cuda") * 2e-4 + 1e-5
    scales[0, 1] *= 1000
    return QuantWeight(values, scales)


def random_rows(rows: int, width: int) -> torch.Tensor:
    """bf16 rows with a few columns a hundred times the rest, as hidden states have."""
    x = torch.randn(rows, width, device="cuda")
    x[:, 5 :: width // 4] *= 100
    return x.bfloat16()


def problem(rows: int, n: int, k: int, fp8: bool, dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    size = n * k * (1 if fp8 else 2)
    sets = max(2, -(-200_000_000 // size)) if rows <= 512 else 2
    x: torch.Tensor | QuantRows = random_rows(rows, k)
    weights: list[torch.Tensor | QuantWeight]
    if fp8:
        x, weights = quantise(x), [random_weight(n, k) for _ in range(sets)]
        wide, w = dequantise(x), dequantise_weight(weights[0])
    else:
        weights = [torch.randn(n, k, device="cuda").bfloat16() / 64 for _ in range(sets)]
        wide, w = x.float(), weights[0].float()
    some = torch.arange(0, rows, max(1, rows // 256), device="cuda")
    want = wide[some] @ w.T
    outs: dict[int, torch.Tensor] = {}

    def run(x: torch.Tensor | QuantRows, weight: torch.Tensor | QuantWeight) -> torch.Tensor:
        if (n, k) != INDEX or fp8:
            return linear(x, weight, dtype)
        assert isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)
        return linear_parts(x, weight)

    def whole(got: torch.Tensor) -> torch.Tensor:
        return added(got, dtype) if got.dim() == 3 else got

    def launch(i: int) -> None:
        outs[i] = run(x, weights[i])

    def error() -> float:
        return float((whole(outs[0])[some].float() - want).norm() / want.norm())

    def exact() -> bool:  # the last row alone, bit for bit
        if isinstance(x, QuantRows):
            one: torch.Tensor | QuantRows = QuantRows(
                x.values[-1:].contiguous(), x.scales[:, -1:].contiguous()
            )
        else:
            one = x[-1:].contiguous()
        return torch.equal(whole(run(one, weights[0])), whole(outs[0])[-1:])

    return Problem(launch, sets, error, launches=20 if rows <= 512 else 6, exact=exact)


def cases() -> Iterator[Case]:
    def case(  # type: ignore[no-untyped-def]
        name, rows, n, k, fp8, dtype=torch.bfloat16, peer=None, target=None, notes=None
    ):
        moved = n * k * (1 if fp8 else 2) + rows * (k * (1 if fp8 else 2) + n * dtype.itemsize)
        floor = max(memory_us(moved), arithmetic_us(2 * rows * n * k, 1580 if fp8 else 790))
        return Case(
            "linear",
            f"{name} {n}x{k}, {rows} rows",
            lambda: problem(rows, n, k, fp8, dtype),
            floor,
            4e-3,
            peer,
            target,
            notes or {},
        )

    for n, k in FP8:
        for i, rows in enumerate(ROWS):
            peers = PEERS.get((n, k), ((), ()))
            peer = peers[0][i] if peers[0] else None
            notes = {"triton_peer_us": peers[1][i]} if peers[1] else {}
            target = TARGETS.get((n, k)) if rows <= 32 else peer and rows == 8192 and peer / 0.8
            yield case("fp8", rows, n, k, True, peer=peer, target=target or None, notes=notes)
    for n, k in BF16:
        for rows in ROWS:
            yield case("bf16", rows, n, k, False)
    for rows in ROWS[:4]:
        yield case("head", rows, *HEAD, False, torch.float32)
