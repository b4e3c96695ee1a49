# SPDX-License-Identifier: Apache-2.0
"""The loader: ranges, threads, files that fail and come back, and what it says meanwhile."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from glmserve.checkpoint import loader as loading
from glmserve.checkpoint.loader import Copy, Loader, copies, piece
from glmserve.checkpoint.progress import ProgressBar
from glmserve.checkpoint.safetensors_header import StoredTensor
from glmserve.errors import CheckpointError

ROWS, COLUMNS = 48, 20
BASE = 24  # bytes before the tensor, as a header


@pytest.fixture
def files(tmp_path: Path) -> dict[Path, torch.Tensor]:
    """Three files, each an fp32 matrix behind some bytes."""
    found = {}
    for number in range(3):
        numbers = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(number))
        file = tmp_path / f"shard-{number}.bin"
        file.write_bytes(b"x" * BASE + numbers.numpy().tobytes())
        found[file] = numbers
    return found


def source(file: Path) -> StoredTensor:
    return StoredTensor(file, "F32", (ROWS, COLUMNS), BASE)


def whole(file: Path, target: torch.Tensor) -> loading.Piece:
    return piece(source(file), (slice(0, ROWS), slice(0, COLUMNS)), target)


@pytest.mark.parametrize("chunk", [1, 200, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("columns", [slice(0, COLUMNS), slice(3, 11)])
def test_slices_arrive_whatever_the_chunk(
    files: dict[Path, torch.Tensor], chunk: int, dtype: torch.dtype, columns: slice
) -> None:
    rows = slice(7, 40)
    targets = {file: torch.empty(33, columns.stop - columns.start, dtype=dtype) for file in files}
    pieces = [piece(source(file), (rows, columns), target) for file, target in targets.items()]
    Loader(list(copies(pieces, chunk)), threads=3).run()
    for file, numbers in files.items():
        assert torch.equal(targets[file], numbers[rows, columns].to(dtype))


def test_neighbours_are_one_read(tmp_path: Path) -> None:
    """Rows that follow each other in the file, for two tensors, are read at once."""
    file = tmp_path / "x"
    file.write_bytes(torch.arange(12.0).numpy().tobytes())
    a, b = torch.empty(2, 2), torch.empty(4, 2)
    parts = [
        piece(StoredTensor(file, "F32", (2, 2), 0), (slice(0, 2), slice(0, 2)), a),
        piece(StoredTensor(file, "F32", (4, 2), 16), (slice(0, 4), slice(0, 2)), b),
    ]
    (job,) = copies(parts)
    assert job.nbytes == 48
    Loader([job]).run()
    assert torch.equal(torch.cat((a, b)).flatten(), torch.arange(12.0))


def test_ranges_are_read_at_the_same_time(
    files: dict[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three reads wait for each other: one after the other would never end."""
    meeting = threading.Barrier(3, timeout=20)
    real = os.preadv

    def preadv(*given: Any) -> int:
        meeting.wait()
        return real(*given)

    monkeypatch.setattr(loading.os, "preadv", preadv)
    targets = [torch.empty(ROWS, COLUMNS) for _ in files]
    pieces = [whole(file, target) for file, target in zip(files, targets, strict=True)]
    Loader(list(copies(pieces)), threads=3).run()
    assert all(torch.equal(t, n) for t, n in zip(targets, files.values(), strict=True))


def test_a_read_that_fails_once_is_read_again(
    files: dict[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_PAUSE", 0.0)
    calls: list[int] = []
    real = os.preadv

    def preadv(*given: Any) -> int:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        return real(*given)

    monkeypatch.setattr(loading.os, "preadv", preadv)
    file, numbers = next(iter(files.items()))
    target = torch.empty(ROWS, COLUMNS)
    Loader(list(copies([whole(file, target)]))).run()
    assert torch.equal(target, numbers)
    assert len(calls) == 2


def test_a_failed_file_is_named_and_loading_goes_on_from_there(
    files: dict[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_PAUSE", 0.0)
    lost = sorted(files)[1]
    kept = lost.read_bytes()
    lost.write_bytes(kept[:-8])
    targets = {file: torch.full((ROWS, COLUMNS), -1.0) for file in files}
    jobs: list[Copy] = copies([whole(file, target) for file, target in targets.items()])
    loader = Loader(list(jobs), threads=2)
    bar = ProgressBar("rank 0", loader.total, lambda _line: None)
    with pytest.raises(CheckpointError, match=r"shard-1\.bin \(ends at byte \d+\).*2 of 3 ranges"):
        loader.run(bar)
    for file in files:
        if file != lost:
            assert torch.equal(targets[file], files[file])
    read: list[Path] = []
    real = Loader._read

    def noted(self: Loader, file: Path, start: int, into: list[torch.Tensor]) -> None:
        read.append(file)
        real(self, file, start, into)

    monkeypatch.setattr(Loader, "_read", noted)
    lost.write_bytes(kept)
    loader.run(bar)
    assert read == [lost]
    assert torch.equal(targets[lost], files[lost])
    assert bar.done == bar.total == 3 * ROWS * COLUMNS * 4


def test_a_file_that_is_gone_is_named(
    files: dict[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_PAUSE", 0.0)
    file = next(iter(files))
    file.unlink()
    with pytest.raises(CheckpointError, match=r"shard-0\.bin .*No such file"):
        Loader(list(copies([whole(file, torch.empty(ROWS, COLUMNS))]))).run()


def test_the_bar_tells_speed_and_time_left() -> None:
    now = [100.0]
    lines: list[str] = []
    bar = ProgressBar("rank 3", int(8e9), lines.append, clock=lambda: now[0])
    bar.add(int(1e9))
    assert lines == []  # not twice within half a second
    now[0] += 2.0
    bar.add(int(1e9))
    assert lines == [
        "rank 3 [######..................] 2.00 of 8.00 GB of weights, 1.00 GB/s, 6 s left"
    ]
    now[0] += 0.1
    bar.add(int(6e9))
    assert lines[-1].startswith(f"rank 3 [{'#' * 24}] 8.00 of 8.00 GB")
