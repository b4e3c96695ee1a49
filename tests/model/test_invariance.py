# SPDX-License-Identifier: Apache-2.0
"""fp64 equalities: the tokens do not depend on chunks, pages, ranks, layouts or other sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glmserve.checkpoint.synthetic import make_checkpoint
from glmserve.model import indexer
from glmserve.model.batch import StepBatch
from glmserve.model.taps import Taps
from glmserve.model_config import ExpertLayout
from glmserve.parallel.group import Group
from tests.model.ranks import Run, batch_of, greedy, load, on_ranks
from tests.tolerances import assert_close

NEW = 24
PROMPT = torch.randint(4, 900, (150,), generator=torch.Generator().manual_seed(7))
IN_ORDER = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_checkpoint(directory, "tiny", seed=5)
    return directory


def run(
    directory: Path,
    ranks: int = 1,
    layout: ExpertLayout = "ep",
    chunk: int = 1 << 20,
    page_table: torch.Tensor = IN_ORDER,
    dtype: torch.dtype = torch.float64,
) -> list[Run]:
    def work(group: Group) -> Run:
        return greedy(load(directory, dtype, group, layout), PROMPT, NEW, page_table, chunk)

    return on_ranks(ranks, work)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Run:
    return run(checkpoint)[0]


def assert_same(reference: Run, got: Run) -> None:
    assert got.tokens == reference.tokens
    assert got.drafts == reference.drafts
    same_choice = reference.prompt_logits.argmax(-1) == got.prompt_logits.argmax(-1)
    assert same_choice.all()
    assert torch.equal(reference.mtp_selected, got.mtp_selected)
    assert_close("logits", reference.prompt_logits, got.prompt_logits, "same_fp64")
    assert_close("mtp hidden", reference.mtp_hidden, got.mtp_hidden, "same_fp64")


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunked_prefill_equals_one_chunk(checkpoint: Path, reference: Run, chunk: int) -> None:
    assert_same(reference, run(checkpoint, chunk=chunk)[0])


def test_permuted_pages_change_nothing(checkpoint: Path, reference: Run) -> None:
    pages = torch.tensor([[6, 0, 3, 5]], dtype=torch.int32)
    assert_same(reference, run(checkpoint, page_table=pages)[0])


@pytest.mark.processes
@pytest.mark.parametrize("layout", ["ep", "sliced"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_equal_one_rank(
    checkpoint: Path, reference: Run, ranks: int, layout: ExpertLayout
) -> None:
    for got in run(checkpoint, ranks, layout):
        assert_same(reference, got)


@pytest.mark.processes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_agree_in_every_bit(checkpoint: Path, dtype: torch.dtype) -> None:
    """Indexer and router are replicated: ranks that differ in one bit would select differently."""
    first, *others = run(checkpoint, ranks=4, dtype=dtype)
    for other in others:
        assert other.tokens == first.tokens
        assert other.drafts == first.drafts
        assert torch.equal(other.hidden, first.hidden)
        assert torch.equal(other.mtp_selected, first.mtp_selected)
        mine, theirs = first.taps[0].tensors(), other.taps[0].tensors()
        for name, tensor in mine.items():
            assert torch.equal(tensor, theirs[name]), name


def test_a_sequence_in_a_mixed_batch_equals_it_alone(checkpoint: Path, reference: Run) -> None:
    """Decode, verify and prefill rows of three sequences in one forward."""
    model = load(checkpoint, torch.float64, pages=12)
    table = torch.tensor([[7, 1, 9], [2, 8, 0], [5, 3, 10]], dtype=torch.int32)
    sequence = torch.cat([PROMPT, torch.tensor(reference.tokens)])
    ends = (151, 20, 120)  # rows computed alone first; the rest of `counts` go in one batch
    counts = (1, 30, 6)
    with torch.inference_mode():
        for line, end in enumerate(ends):
            model.decoder.forward(batch_of(sequence[:end], 0, table, line), model.caches)
        parts = [
            batch_of(sequence[end : end + count], end, table, line)
            for line, (end, count) in enumerate(zip(ends, counts, strict=True))
        ]
        mixed = StepBatch(
            torch.cat([p.tokens for p in parts]),
            torch.cat([p.positions for p in parts]),
            torch.cat([p.row_seq for p in parts]),
            table,
        )
        hidden = model.decoder.forward(mixed, model.caches)
    expected = torch.cat(
        [reference.hidden[end : end + count] for end, count in zip(ends, counts, strict=True)]
    )
    assert_close("hidden", expected, hidden, "same_fp64")


def test_reused_selection_neither_scores_nor_writes_index_keys(checkpoint: Path) -> None:
    model = load(checkpoint, torch.float64)
    with torch.inference_mode():
        hidden = model.decoder.forward(batch_of(PROMPT[:-1], 0, IN_ORDER), model.caches)
        batch = batch_of(PROMPT[:-1], 0, IN_ORDER)
        out, selection = model.mtp.forward(batch, PROMPT[1:], hidden, model.caches, None, True)
        assert model.caches.mtp is not None
        assert model.caches.mtp.index_k is not None
        keys, latents = model.caches.mtp.index_k.clone(), model.caches.mtp.latent.clone()
        last = torch.tensor([len(PROMPT) - 2])
        row = batch.select(last).advance()
        kept = selection.select(last)
        _, used = model.mtp.forward(row, PROMPT[:1], out[last], model.caches, kept, False)
    assert used is kept
    assert torch.equal(model.caches.mtp.index_k, keys)
    changed = (model.caches.mtp.latent != latents).any(1).nonzero().flatten()
    assert changed.tolist() == [len(PROMPT)]  # position T - 1, so slot T


def test_rolled_back_rows_leave_no_trace(checkpoint: Path, reference: Run) -> None:
    """Rejected drafts write cache rows; the right tokens written over them must win."""
    model = load(checkpoint, torch.float64)
    sequence = torch.cat([PROMPT, torch.tensor(reference.tokens)])
    with torch.inference_mode():
        model.decoder.forward(batch_of(sequence[:140], 0, IN_ORDER), model.caches)
        wrong = (sequence[140:146] + 1) % 900
        model.decoder.forward(batch_of(wrong, 140, IN_ORDER), model.caches)
        hidden = model.decoder.forward(batch_of(sequence[140:150], 140, IN_ORDER), model.caches)
    assert_close("hidden", reference.hidden[140:150], hidden, "same_fp64")


@pytest.mark.processes
@pytest.mark.parametrize("rows", [149, 150])
def test_ranks_that_score_shares_of_a_prefill_select_the_same(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    scored: list[int] = []
    original = indexer.index_logits

    def counted(query: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        scored.append(len(query))
        return original(query, *rest, **named)

    monkeypatch.setattr(indexer, "index_logits", counted)

    def work(group: Group) -> Taps:
        model, taps = load(checkpoint, torch.float64, group), Taps()
        model.decoder.forward(batch_of(PROMPT[:rows], 0, IN_ORDER), model.caches, taps)
        return taps

    (alone,) = on_ranks(1, work)
    assert set(scored) == {rows}
    scored.clear()
    monkeypatch.setattr(indexer, "SPLIT_ROWS", 100)
    for taps in on_ranks(4, work):
        for got, want in zip(taps.selections, alone.selections, strict=True):
            assert torch.equal(got.positions, want.positions)
            assert torch.equal(got.slots, want.slots)
        assert_close("hidden", alone.hidden[-1], taps.hidden[-1], "same_fp64")
    assert set(scored) == {38}


def test_scores_in_parts_select_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taps_of() -> Taps:
        model, taps = load(checkpoint, torch.float64), Taps()
        model.decoder.forward(batch_of(PROMPT, 0, IN_ORDER), model.caches, taps)
        return taps

    with torch.inference_mode():
        whole = taps_of()
        monkeypatch.setattr(indexer, "MOST_SCORES", 192 * 40)  # three pages are scored
        parts = taps_of()
    for got, want in zip(parts.selections, whole.selections, strict=True):
        assert torch.equal(got.positions, want.positions)
