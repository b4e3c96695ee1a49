# SPDX-License-Identifier: Apache-2.0
"""The ledger against the published arithmetic of the model, figure by figure, within 1%.

A published figure is rounded, so half a unit of its last digit is allowed as well.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from glmserve.checkpoint.declared import Source, open_source
from glmserve.checkpoint.ledger import (
    GATHER_RATE,
    Ledger,
    experts_hit,
    experts_hit_busiest,
    ledger,
    prefill_floor,
)
from glmserve.cli import main
from glmserve.errors import ConfigError

K = 1024
CONTEXTS = {"8K": 8 * K, "100K": 100 * K, "1M": 1024 * K}


@pytest.fixture(scope="module")
def glm() -> Source:
    return open_source("glm-5.2-fp8")


def close(got: float, published: str) -> None:
    digits = len(published.partition(".")[2])
    value = float(published)
    assert abs(got - value) <= 0.01 * value + 0.5 * 10.0**-digits, (got, published)


def step(glm: Source, rows: int, context: str, drafts: int, **more: Any) -> Ledger:
    return ledger(glm, 8, rows, CONTEXTS[context], drafts, eh_proj_replicated=True, **more)


@pytest.mark.parametrize(
    ("operators", "published"),
    [
        (["a_proj"], "1.258"),
        (["q_b", "o_proj"], "1.309"),
        (["absorbed kv_b"], "0.286"),
        (["indexer projections"], "0.217"),
        (["router"], "0.236"),
        (["shared expert"], "0.354"),
        (["dense FFN"], "0.085"),
        (["lm_head"], "0.238"),
        (["norms"], "0.002"),
    ],
)
def test_weights_that_every_step_reads(glm: Source, operators: list[str], published: str) -> None:
    made = step(glm, 1, "8K", 0)
    close(sum(made.find(name).bytes for name in operators) / 1e9, published)


def test_their_sum(glm: Source) -> None:
    made = step(glm, 32, "100K", 0)
    moving = {"routed experts", "index keys", "sparse attention"}
    close(sum(o.bytes for o in made.operators if o.name not in moving) / 1e9, "3.985")


@pytest.mark.parametrize(
    ("rows", "mean", "busiest"),
    [(1, "1.00", "2.57"), (6, "5.55", "8.75"), (32, "20.41", "24.2"), (192, "31.93", "32")],
)
def test_experts_that_are_hit(glm: Source, rows: int, mean: str, busiest: str) -> None:
    close(experts_hit(glm.config, 8, "ep", rows), mean)
    close(experts_hit_busiest(glm.config, 8, "ep", rows), busiest)


# requests, drafts, rows, context, experts (busiest), sparse attention low, high, index, MTP, total,
# ms at 4.3 TB/s
TABLE = """
1  0 1   8K   2.83 7.27 0.10 0.10 0.02 0    6.94 1.62
1  0 1   100K 2.83 7.27 0.10 0.10 0.28 0    7.21 1.68
1  0 1   1M   2.83 7.27 0.10 0.10 2.91 0    9.83 2.29
1  5 6   8K   15.7 24.8 0.10 0.42 0.02 2.6  22.4 5.2
1  5 6   100K 15.7 24.8 0.10 0.63 0.28 2.6  22.7 5.3
1  5 6   1M   15.7 24.8 0.10 0.63 2.91 2.7  25.4 5.9
32 0 32  8K   57.8 68.5 3.35 3.35 0.73 0    65.9 15.3
32 0 32  100K 57.8 68.5 3.35 3.35 9.08 0    74.2 17.3
32 0 32  1M   57.8 68.5 3.35 3.35 93.0 0    158  36.8
32 5 192 8K   90.4 90.6 3.35 13.4 0.73 6.8  105  24.5
32 5 192 100K 90.4 90.6 3.35 20.1 9.08 7.2  114  26.5
32 5 192 1M   90.4 90.6 3.35 20.1 93.0 11.2 202  47.0
"""


@pytest.mark.parametrize("line", TABLE.strip().splitlines())
def test_the_published_steps(glm: Source, line: str) -> None:
    requests, drafts, rows, context, *published = line.split()
    assert int(rows) == int(requests) * (int(drafts) + 1)
    made = step(glm, int(rows), context, int(drafts))
    experts, attention = made.find("routed experts").bytes, made.find("sparse attention")
    busiest = experts / made.experts_hit * made.experts_hit_busiest
    drafting = sum(o.bytes for o in made.drafting)
    assert attention.high is not None
    figures = (experts, busiest, attention.bytes, attention.high, made.find("index keys").bytes)
    for got, want in zip((*figures, drafting, made.bytes), published, strict=False):
        close(got / 1e9, want)
    close(made.floor * 1e3, published[-1])


def test_sliced_experts_read_the_mean_on_every_rank(glm: Source) -> None:
    whole, sliced = (step(glm, 6, "8K", 5, layout=layout) for layout in ("ep", "sliced"))
    a, b = (made.find("routed experts").bytes for made in (whole, sliced))
    assert b == pytest.approx(a, rel=2e-4)  # scales aside
    assert sliced.experts_hit_busiest == sliced.experts_hit


def test_columns_of_eh_proj_are_an_eighth(glm: Source) -> None:
    ours, whole = (
        ledger(glm, 8, 6, 8 * K, 5, eh_proj_replicated=replicated).find("draft eh_proj")
        for replicated in (False, True)
    )
    assert whole.bytes == 8 * ours.bytes == 5 * 6144 * 12288 * 2


def test_flops_are_the_active_parameters(glm: Source) -> None:
    """Over all ranks, a row multiplies each active parameter once (attention's own are extra)."""
    made = step(glm, 1, "8K", 0)
    whole_everywhere = {"a_proj", "indexer projections", "router"}
    total = sum(
        o.flops * (1 if o.name in whole_everywhere else 8)
        for o in made.operators
        if o.name not in ("index keys", "sparse attention")
    )
    assert total / 2 == pytest.approx(40_297_758_720, rel=1e-3)
    close(made.find("sparse attention").flops / 78 / 2 / 1e6, "17.8")
    close(ledger(glm, 8, 1, 100 * K, 0).find("index keys").flops / 21 / 2 / 1e6, "419")


def test_links(glm: Source) -> None:
    target = step(glm, 192, "8K", 5).collectives[0]
    assert target.count == 157
    assert target.payload == 192 * 6144 * 2
    assert target.one_shot == 157 * 7 * target.payload
    assert target.two_shot == 157 * 1.75 * target.payload
    assert step(glm, 1, "8K", 0).collectives[0].floor < target.floor
    alone = ledger(glm, 1, 1, 8 * K, 0).collectives[0]
    assert alone.one_shot == alone.two_shot == 0


def test_rows_are_whole_requests(glm: Source) -> None:
    with pytest.raises(ConfigError, match="rows = 32: a request with 5 drafts has 6 rows"):
        step(glm, 32, "8K", 5)


def test_ledger_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["ledger", "glm-5.2-fp8", "--rows", "192", "--drafts", "5", "--replicate-eh-proj"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "routed experts                      90.415" in out
    assert "step: 105.20 GB; floor 24.46 ms at 4.3 TB/s" in out
    assert main([*asked, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    operators = record["operators"] + record["drafting"]
    assert sum(o["bytes"] for o in operators) == pytest.approx(record["bytes"])
    assert sum(o["floor_us"] for o in operators) == pytest.approx(record["operator_floor_ms"] * 1e3)


def test_inspect_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "glm-5.2-fp8"]) == 0
    out = capsys.readouterr().out
    assert "118,629 tensors, 755,617,140,416 bytes; no files" in out
    assert "a rank of 8 reads 95.96 GB of files" in out
    assert "requests at once of 1,048,576 tokens" in out
    assert main(["inspect", "glm-5.2-fp8", "--kv", "bf16", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["token_bytes"] == 79 * 576 * 2 + 22 * 128 * 2
    assert main(["inspect", "glm-5.2-fp8", "--ranks", "4"]) == 1
    assert "is too little: " in capsys.readouterr().err
    assert main(["inspect", "nowhere"]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_a_prompts_floor_is_the_published_one_less_what_short_contexts_save(glm: Source) -> None:
    """About 225 ms with 2048 selections for every row; the first 2048 rows have fewer."""
    floor = prefill_floor(glm, 8, 8 * K)
    saved = 2048 * 2048 / 2 * 656 * 78 / GATHER_RATE
    assert 0.205 < floor + saved < 0.235
    assert prefill_floor(glm, 8, 4 * K) < floor / 2 + 0.02
