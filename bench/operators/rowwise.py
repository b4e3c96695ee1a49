# SPDX-License-Identifier: Apache-2.0
"""Row-by-row operators: residual + norm, its fp8 form, SwiGLU + fp8, quantisation, MTP input,
embedding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bench.registry import Case, Problem, memory_us
from glmserve.kernels.mtp_input import launch as mtp_launch
from glmserve.kernels.mtp_input import reference as mtp_reference
from glmserve.kernels.quantise import QuantRows, dequantise
from glmserve.kernels.quantise import launch as quantise_launch
from glmserve.kernels.quantise import reference as quantise_reference
from glmserve.kernels.residual_norm import launch as norm_launch
from glmserve.kernels.residual_norm import reference as norm_reference
from glmserve.kernels.swiglu import launch as swiglu_launch
from glmserve.kernels.swiglu import reference as swiglu_reference
from glmserve.kernels.vocabulary import launch as vocabulary_launch

WIDTH, EPS = 6144, 1e-5
ROWS = (1, 6, 32, 192, 8192)
SHARD = 19360


def _rows(rows: int, width: int, device: torch.device | str = "cuda") -> torch.Tensor:
    if torch.device(device).type == "meta":
        return torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    x = torch.randn(rows, width, device=device)
    x[:, 7 :: width // 4] *= 200
    return x.bfloat16()


def launches(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    x, w = _rows(6, WIDTH, device), _rows(1, WIDTH, device)[0]
    yield "norm", lambda: norm_launch.residual_norm(x, None, w, EPS)
    yield "residual norm", lambda: norm_launch.residual_norm(x, x, w, EPS)
    yield "residual norm fp8", lambda: norm_launch.residual_norm(x, x, w, EPS, True)
    yield "quantise", lambda: quantise_launch.quantise(x)
    yield "mtp", lambda: mtp_launch.mtp_input(x, x, w, w, EPS)
    for inner in (1536, 256):
        g = _rows(6, 2 * inner, device)
        yield f"swiglu {inner}", lambda g=g: swiglu_launch.swiglu(g)
        yield f"swiglu fp8 {inner}", lambda g=g: swiglu_launch.swiglu_quantised(g)
    tokens = torch.empty(6, dtype=torch.int64, device=device)
    table = _rows(SHARD, WIDTH, device)
    yield "embed", lambda: vocabulary_launch.embed_shard(tokens, table, 0)


def _same(got: QuantRows, want: QuantRows) -> bool:
    """Bit for bit, -0 and 0 being one value."""
    return torch.equal(got.scales, want.scales) and torch.equal(
        got.values.float(), want.values.float()
    )


def _problem(
    sets: int,
    run: Callable[[int], object],
    error: Callable[[object], float],
    exact: Callable[[object], bool] | None = None,
    launches: int = 20,
) -> Problem:
    outs: dict[int, object] = {}

    def launch(i: int) -> None:
        outs[i] = run(i)

    check = None if exact is None else lambda: exact(outs[0])
    return Problem(launch, sets, lambda: error(outs[0]), launches, check)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def norm_problem(rows: int, quantised: bool) -> Problem:
    torch.manual_seed(0)
    sets = max(2, min(400, 200_000_000 // (rows * WIDTH * 8)))
    inputs = [(_rows(rows, WIDTH), _rows(rows, WIDTH)) for _ in range(sets)]
    weight = torch.randn(WIDTH, device="cuda").bfloat16()
    want = norm_reference.residual_rms_norm(*inputs[0], weight, EPS)

    def error(out: object) -> float:
        return max(_relative(a, b) for a, b in zip(out, want, strict=False))  # type: ignore[call-overload]

    def exact(out: object) -> bool:
        normed, total, rows8 = out  # type: ignore[misc]
        fp8 = rows8 is None or _same(rows8, quantise_reference.quantise(normed))
        return torch.equal(total, want[1]) and fp8

    return _problem(
        sets,
        lambda i: norm_launch.residual_norm(*inputs[i], weight, EPS, quantised),
        error,
        exact,
    )


def quantise_problem(rows: int) -> Problem:
    torch.manual_seed(0)
    sets = max(2, min(400, 200_000_000 // (rows * WIDTH * 3)))
    inputs = [_rows(rows, WIDTH) for _ in range(sets)]
    inputs[0][0, :128] = 0
    want = quantise_reference.quantise(inputs[0])
    return _problem(
        sets,
        lambda i: quantise_launch.quantise(inputs[i]),
        lambda out: 0.0,
        lambda out: _same(out, want),  # type: ignore[arg-type]
    )


def swiglu_problem(rows: int, inner: int) -> Problem:
    torch.manual_seed(0)
    sets = max(2, min(400, 200_000_000 // (rows * inner * 5)))
    inputs = [_rows(rows, 2 * inner) / 8 for _ in range(sets)]
    wide = swiglu_reference.swiglu(inputs[0].double())

    def exact(out: object) -> bool:
        plain = swiglu_launch.swiglu(inputs[0])
        close = _relative(plain, wide) < 4e-3
        return close and _same(out, quantise_reference.quantise(plain))  # type: ignore[arg-type]

    return _problem(
        sets,
        lambda i: swiglu_launch.swiglu_quantised(inputs[i]),
        lambda out: _relative(dequantise(out), wide),  # type: ignore[arg-type]
        exact,
    )


def mtp_problem(rows: int) -> Problem:
    torch.manual_seed(0)
    sets = max(2, min(400, 200_000_000 // (rows * WIDTH * 8)))
    inputs = [(_rows(rows, WIDTH), _rows(rows, WIDTH)) for _ in range(sets)]
    weights = [torch.randn(WIDTH, device="cuda").bfloat16() for _ in range(2)]
    want = mtp_reference.mtp_input(*(t.double() for t in (*inputs[0], *weights)), EPS)
    return _problem(
        sets,
        lambda i: mtp_launch.mtp_input(*inputs[i], *weights, EPS),
        lambda out: _relative(out, want),  # type: ignore[arg-type]
    )


def embed_problem(rows: int) -> Problem:
    torch.manual_seed(0)
    table = _rows(SHARD, WIDTH)
    tokens = [torch.randint(0, 2 * SHARD, (rows,), device="cuda") for _ in range(20)]
    local = tokens[0] - SHARD // 2
    here = (local >= 0) & (local < SHARD)
    want = table[local.clamp(0, SHARD - 1)] * here[:, None]
    return _problem(
        20,
        lambda i: vocabulary_launch.embed_shard(tokens[i], table, SHARD // 2),
        lambda out: 0.0,
        lambda out: torch.equal(out, want),  # type: ignore[arg-type]
    )


def cases() -> Iterator[Case]:
    for rows in ROWS:
        row = rows * WIDTH
        few = (3.0 if rows <= 32 else 6.0) if rows <= 192 else None

        def case(op, shape, build, moved, tolerance, rows=rows, target=few):  # type: ignore[no-untyped-def]
            name = f"{shape}, {rows} rows" if shape else f"{rows} rows"
            return Case(op, name, build, memory_us(moved), tolerance, None, target)

        yield case("residual_norm", "bf16", lambda r=rows: norm_problem(r, False), row * 8, 4e-3)
        yield case(
            "residual_norm", "bf16 + fp8", lambda r=rows: norm_problem(r, True), row * 9, 4e-3
        )
        yield case("quantise", "6144", lambda r=rows: quantise_problem(r), row * 3, 0.0)
        for inner in (1536, 256):
            moved = rows * inner * 5
            yield case(
                "swiglu_fp8",
                str(inner),
                lambda r=rows, i=inner: swiglu_problem(r, i),
                moved,
                3e-2,
            )
        yield case("mtp_input", "", lambda r=rows: mtp_problem(r), row * 8, 4e-3)
        yield case("embedding", "", lambda r=rows: embed_problem(r), row * 3, 0.0)
