# SPDX-License-Identifier: Apache-2.0
"""Logit shaping kernels against the reference over the same tables, bit for bit in fp32."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from glmserve.kernels.logit_shaping import (
    LISTED,
    SHAPED,
    WORDS,
    ShapingTables,
    launch,
    reference,
)


def tables_of(lines: int, width: int, first: int) -> ShapingTables:
    """Every combination of flags; words that the recent tokens and drafts complete."""
    tables = ShapingTables.make(lines, width, torch.device("cpu"))
    combinations = torch.tensor([0, SHAPED, SHAPED | LISTED, SHAPED | WORDS, 7])
    tables.flags.copy_(combinations.repeat(-(-lines // 5))[:lines])
    tables.penalties.copy_(torch.rand(lines, 3, dtype=torch.float64) * 2 - 0.7)
    tables.penalties[:, 2] = torch.rand(lines, dtype=torch.float64) * 3 + 0.1
    tables.counts.copy_(torch.randint(-9, 4, (lines, width)).clamp(min=0))
    tables.bias.copy_(torch.randn(lines, width) * (torch.rand(lines, width) < 0.1))
    for bits in (tables.in_prompt, tables.allowed):
        bits.copy_(torch.randint(-(1 << 31), 1 << 31, bits.shape).to(torch.int32))
    tables.recent.copy_(torch.randint(first, first + 3, tables.recent.shape))
    tables.recent[1::2, :-2] = -2  # a short history
    for line in range(lines):
        for word in range(0, 256, 5):
            length = int(torch.randint(1, 6, ()))
            tables.words[line, word, 32 - length : 31] = torch.randint(first, first + 3, (1,))
            tables.words[line, word, 31] = torch.randint(first - 2, first + width, (1,))
        tables.words[line, 1, 1:31] = tables.recent[line, 2:]  # as long as one can be
        tables.words[line, 1, 0] = tables.recent[line, 1]
        tables.words[line, 1, 31] = first + 4
    return tables


def moved(tables: ShapingTables, device: torch.device) -> ShapingTables:
    fields = dataclasses.fields(tables)
    return ShapingTables(*(getattr(tables, f.name).to(device, copy=True) for f in fields))


@pytest.mark.parametrize(("rows", "width", "first", "k"), [(7, 70, 0, 0), (12, 1500, 3000, 3)])
def test_shaped_logits_and_confirmed_counts(
    device: torch.device, rows: int, width: int, first: int, k: int
) -> None:
    check(device, rows, width, first, k)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "k"), [(1, 5), (192, 5), (576, 3)])
def test_real_shapes(device: torch.device, rows: int, k: int) -> None:
    check(device, rows, 19360, 2 * 19360, k)


def check(device: torch.device, rows: int, width: int, first: int, k: int) -> None:
    lines = min(rows, 20) + 5
    cpu = tables_of(lines, width, first)
    gpu = moved(cpu, device)
    logits = torch.randn(rows, width) * 5
    logits[0, ::3] = -torch.inf
    line = torch.randint(0, lines, (rows,))
    drafts = torch.randint(0, k + 1, (rows, 1))
    ahead = torch.where(torch.arange(k) < drafts, torch.randint(first, first + 3, (rows, k)), -1)
    positions = torch.randint(0, 20, (rows,))
    stops = torch.randint(first - 5, first + width + 5, (lines, 6))
    stops[:, 4:] = -1
    stops_from = torch.stack([torch.full((lines,), 10), torch.zeros(lines, dtype=torch.int64)], 1)
    inputs = line, positions, ahead, stops, stops_from[:, 0]
    there = [x.to(device) for x in inputs]
    want = reference.shape(logits, cpu, first, *inputs)
    got = launch.shape(logits.to(device), gpu, first, *there)
    assert torch.equal(got.cpu(), want)
    assert not torch.equal(want, logits)
    empty = ShapingTables.make(lines, width, torch.device("cpu"))
    want = reference.shape(logits, None, first, *inputs)
    got = launch.shape(logits.to(device), moved(empty, device), first, *there)
    assert torch.equal(got.cpu(), want)
    order = torch.randperm(lines)[: max(1, lines - 2)]
    tokens = torch.randint(first - 2, first + 9, (len(order), k + 3), dtype=torch.int32)
    count = torch.randint(0, k + 2, (len(order),), dtype=torch.int32)
    view, views = tokens[:, 1 : k + 2], tokens.to(device)[:, 1 : k + 2]  # strided, as results are
    reference.confirm(cpu, first, order, view, count)
    rows_there = torch.stack([order, order - 1], dim=1).to(device)[:, 0]  # strided as well
    launch.confirm(gpu, first, rows_there, views, count.to(device))
    for field in dataclasses.fields(cpu):
        assert torch.equal(getattr(gpu, field.name).cpu(), getattr(cpu, field.name)), field.name


@pytest.mark.parametrize(("width", "first"), [(50, 0), (1101, 2202)])
def test_grammar_masks_shut_ids_in_place(device: torch.device, width: int, first: int) -> None:
    first_word = first >> 5
    words = ((first + width - 1) >> 5) - first_word + 1
    bits = torch.randint(-(1 << 31), 1 << 31, (3, words)).to(torch.int32)
    places = torch.tensor([5, 0, 2], dtype=torch.int32)
    logits = torch.randn(6, width)
    want, got = logits.clone(), logits.to(device, copy=True)
    reference.shut_ids(want, places, bits, first, first_word)
    launch.shut_ids(got, places.to(device), bits.to(device), first, first_word)
    assert torch.equal(got.cpu(), want)
    assert torch.equal(want[[1, 3, 4]], logits[[1, 3, 4]])
    assert 0.3 < torch.isfinite(want[[5, 0, 2]]).float().mean() < 0.7
