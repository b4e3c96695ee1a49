# SPDX-License-Identifier: Apache-2.0
"""Chains of launches, replayed under load, give the bits of the same launches made one at a time.

Races between programs, launches that start before the one ahead of them has ended, and workspaces
that are used again show only on a busy GPU, and there only now and then: a launch that is waited
for is right. Whether the values are right is checked elsewhere; top-k has such a test of its own.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
from torch import Tensor

from bench.operators import layer as layers
from bench.operators.linear import FP8, HEAD, INDEX, random_rows, random_weight
from bench.operators.sampling import SHARD, VALID, random_logits, row_settings
from glmserve.checkpoint.declared import CONFIGS, open_source
from glmserve.checkpoint.weights import LayerWeights, MoeWeights
from glmserve.config import PAGE_SIZE, EngineConfig
from glmserve.kernels.linear.launch import linear
from glmserve.kernels.linear.parts import linear_parts
from glmserve.kernels.quantise import quantise
from glmserve.kernels.residual_norm import Normed
from glmserve.kernels.sampling import launch as sampling
from glmserve.model.layer import DecoderLayer
from glmserve.model.moe import moe
from glmserve.parallel.stand_in import StandInGroup, StandInPeers
from glmserve.runtime.lone_rank import LoneRank, open_rank, pages_of
from glmserve.runtime.rank_bench import PLAIN, Case, Decode, captured

pytestmark = pytest.mark.gpu

SECONDS = 0.3  # of replays
CONFIG, CONTEXT = layers.CONFIG, layers.CONTEXT
STEPS = (Case(1, CONTEXT, 0), Case(6, CONTEXT, 5), Case(64, CONTEXT, 0))
ROWS = (1, 9, 64, 192)


def bits(out: Tensor) -> Tensor:
    flat = out.contiguous().view(-1)
    return flat.view(torch.int16 if flat.nbytes % 4 else torch.int32)


@torch.inference_mode()
def check(run: Callable[[], Iterator[Tensor]], before: Callable[[], object] = lambda: None) -> None:
    """`run` launches a chain and yields what it writes; `before` puts back what it changes."""
    launches = 0

    def wait(*_: object) -> None:
        nonlocal launches
        torch.cuda.synchronize()
        launches += 1

    before()
    triton.knobs.runtime.launch_enter_hook.add(wait)
    try:
        want = [bits(out).clone() for out in run()]
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(wait)
    assert launches > 1
    differed = torch.zeros(len(want), dtype=torch.int64, device=want[0].device)  # replays
    outs: list[Tensor] = []

    def chain() -> None:
        outs[:] = [bits(out) for out in run()]
        differed.add_(torch.stack([(a != b).any() for a, b in zip(outs, want, strict=True)]))

    def clear() -> None:  # what a launch leaves out must not be there from the replay before
        torch._foreach_zero_(outs)
        before()

    before()
    replay = captured(chain)
    reset = captured(clear)
    pending: deque[torch.cuda.Event] = deque()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for _ in range(8):
            reset()
            replay()
        pending.append(torch.cuda.Event())
        pending[-1].record()
        if len(pending) > 8:  # so that the GPU has work all the time, but not for seconds
            pending.popleft().synchronize()
    assert differed.tolist() == [0] * len(want)


def routed_layers(indexed: bool) -> Iterator[LayerWeights]:
    """Three layers whose routers choose among all experts."""
    for _ in range(3):
        weights = layers.with_experts(layers.make_layer(indexed), layers.LOCAL)
        assert isinstance(weights.ffn, MoeWeights)
        weights.ffn.gate.normal_(0, CONFIG.hidden_size**-0.5)
        yield weights


def equalise(group: StandInGroup) -> None:
    """Rows that the other ranks would sum are what the stand-in's buffers hold, in one half for
    even launches and one for odd: chains with an odd number of boundaries would take turns."""
    assert isinstance(group.peers, StandInPeers)
    own = group.peers._buffers[group.rank].view(torch.bfloat16).view(4, -1)
    own[3].copy_(own[2])


@pytest.mark.parametrize("rows", [*ROWS, 32])
def test_products(rows: int) -> None:
    wide = {k: random_rows(rows, k) for _, k in FP8}
    weights = [(quantise(wide[k]), random_weight(n, k)) for n, k in (*FP8, *FP8)]
    index, head = (torch.randn(n, k, device="cuda").bfloat16() / 64 for n, k in (INDEX, HEAD))

    def run() -> Iterator[Tensor]:
        for i, (x, weight) in enumerate(weights + weights[::-1]):
            yield linear(x, weight, torch.bfloat16)
            if i % 4 == 1:
                yield linear_parts(wide[INDEX[1]], index)
        yield linear(wide[HEAD[1]], head, torch.float32)

    check(run)


@pytest.mark.parametrize("rows", [*ROWS, 32, 1024])
def test_routers_and_experts(rows: int) -> None:
    several = list(routed_layers(False))
    inputs = [random_rows(rows, CONFIG.hidden_size) for _ in several]
    normed = [Normed(x, quantise(x)) for x in inputs]

    def run() -> Iterator[Tensor]:
        for x, layer in zip(normed * 2, several * 2, strict=True):
            assert isinstance(layer.ffn, MoeWeights)
            out, chosen = moe(x, layer.ffn, CONFIG)
            yield from (out, chosen.ids, chosen.weights)

    check(run)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("indexed", [False, True], ids=["shared index", "own index"])
def test_layers(rows: int, indexed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = 1 if rows == 9 else rows  # 9: one request and its drafts
    monkeypatch.setitem(layers.STEPS, rows, (requests, 0, 0.0, 0))  # no layers of its own
    sets, group = layers.Sets(rows, indexed), StandInGroup(2, 8)
    group.share_memory(2048, CONFIG.hidden_size)
    equalise(group)
    several = [DecoderLayer(CONFIG, w, group, CONFIG.rms_norm_eps) for w in routed_layers(indexed)]

    def run() -> Iterator[Tensor]:
        normed, residual, selection = sets.normed, sets.residual, sets.selection
        for layer in several * 2:
            normed, residual, chosen = layer.forward(
                normed, residual, sets.step, sets.cache, None if indexed else selection,
                layer.weights.input_norm, True,
            )  # fmt: skip
            assert normed.quantised is not None
            yield from (normed.rows, residual, normed.quantised.values, normed.quantised.scales)
            if indexed:
                yield chosen.slots

    check(run)


@pytest.mark.parametrize("rows", ROWS)
def test_sampling(rows: int) -> None:
    inputs = [random_logits(rows) for _ in range(3)]
    shard, scratch = sampling.Shard(0, SHARD, VALID), sampling.Scratch.make(rows, inputs[0].device)
    plain, limited = (row_settings(rows, "cuda", limits, False) for limits in (False, True))

    def run() -> Iterator[Tensor]:
        for x in inputs:
            yield sampling.greedy(x, shard, scratch, True)
            yield sampling.draw(x, plain, shard, None, scratch, True)
            cuts = sampling.find_cuts(x, limited, shard, scratch, lambda y: y[None])
            yield sampling.draw(x, limited, shard, cuts, scratch, True)

    check(run)


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> LoneRank:
    """One of eight, with six layers: a dense one, two that score for themselves."""
    raw = json.loads((CONFIGS / "glm-5.2-fp8.json").read_text())
    raw |= {"num_hidden_layers": 6, "first_k_dense_replace": 1}
    raw["indexer_types"] = raw["indexer_types"][2:8]
    path = tmp_path_factory.mktemp("replays") / "config.json"
    path.write_text(json.dumps(raw))
    config = EngineConfig(
        str(path), ranks=8, device="cuda", dtype="bf16", collectives="nccl", synthetic=True,
        drafts=5, max_rows=64, chunk=256, max_model_len=CONTEXT + PAGE_SIZE,
    )  # fmt: skip
    pages = 1 + max(case.requests * pages_of(CONTEXT, case.drafts) for case in STEPS)
    group = StandInGroup(0, 8)
    group.share_memory(2048, CONFIG.hidden_size)
    return open_rank(open_source(str(path), files=False), config, group, pages, 0, print)


@pytest.mark.parametrize("case", STEPS, ids=lambda c: f"{c.rows} rows, {c.drafts} drafts")
def test_decode_steps(rank: LoneRank, case: Case) -> None:
    assert isinstance(rank.group, StandInGroup)
    equalise(rank.group)  # another case left its own rows there
    decode = Decode(rank, case)
    runner, layout = decode.runner, decode.requests.layout
    table = runner.state.table
    start = table.clone()

    def run() -> Iterator[Tensor]:
        hidden, logits = runner.forward(layout)
        draws, results = runner.finish(layout, hidden, logits, PLAIN)
        assert results is not None
        yield from (hidden, logits, draws, results, table)

    check(run, before=lambda: table.copy_(start))
