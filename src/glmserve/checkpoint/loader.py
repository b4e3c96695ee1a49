# SPDX-License-Identifier: Apache-2.0
"""Moves a rank's bytes from files into the final tensors: ranged reads, several at once.

Rows of a tensor are one range of its file. A slice of columns is read as whole rows, because
storage hands out blocks and other ranks want the rest of them anyway, and cut in memory. Bytes that
stay as they are go straight to their place on a CPU; otherwise they pass through a thread's staging
memory, on CUDA pinned and with a stream of the thread. Not its job: which bytes (`reader`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from glmserve.checkpoint.formats import Part, StoredWeight
from glmserve.checkpoint.progress import ProgressBar
from glmserve.checkpoint.safetensors_header import ITEM_BYTES, StoredTensor
from glmserve.errors import CheckpointError

CHUNK = 32 << 20  # bytes of one read
THREADS = 8
ATTEMPTS = 3  # reads of a range before its file counts as failed
_MOST_PIECES = 1000  # one call of preadv fills at most 1024 buffers
_PAUSE = 0.2  # seconds before the second attempt, doubled after that

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """Some rows of a stored tensor and where their columns go."""

    source: StoredTensor
    first: int
    rows: int
    columns: slice | None  # None: all of a row
    target: Tensor  # [rows, columns], or [rows] of a vector

    @property
    def pitch(self) -> int:
        return self.source.nbytes // self.source.shape[0]

    @property
    def start(self) -> int:
        return self.source.offset + self.first * self.pitch

    @property
    def nbytes(self) -> int:
        return self.rows * self.pitch

    @property
    def direct(self) -> bool:
        """Whether the file's bytes are what the target's memory holds."""
        target = self.target
        same = target.dtype == DTYPES[self.source.dtype] and target.device.type == "cpu"
        return same and self.columns is None and target.is_contiguous()

    def split(self, limit: int) -> Iterator[Piece]:
        step = max(1, limit // self.pitch)
        for done in range(0, self.rows, step):
            count = min(step, self.rows - done)
            target = self.target[done : done + count]
            yield Piece(self.source, self.first + done, count, self.columns, target)


@dataclass(frozen=True)
class Copy:
    """Neighbouring pieces of one file, read at once; they are written as they are stored."""

    pieces: tuple[Piece, ...]

    @property
    def file(self) -> Path:
        return self.pieces[0].source.file

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(frozen=True)
class Convert:
    """A weight whose parts are needed together: `finish` gets them on the target's device."""

    weight: StoredWeight
    parts: Mapping[str, Part]
    finish: Callable[[dict[str, Tensor]], None]
    device: torch.device

    @property
    def file(self) -> Path:
        return self.weight.parts["values"].file

    @property
    def start(self) -> int:
        return self.weight.parts["values"].offset

    @property
    def nbytes(self) -> int:
        return sum(
            self.weight.parts[role].nbytes // self.weight.parts[role].shape[0]
            * (part[0].stop - part[0].start)
            for role, part in self.parts.items()
        )  # fmt: skip


Job = Copy | Convert


def piece(source: StoredTensor, part: Part, target: Tensor) -> Piece:
    """The read of one slice of a stored tensor into `target`, which has the slice's shape."""
    columns = None
    if len(part) == 2 and part[1] != slice(0, source.shape[1]):
        columns = part[1]
    return Piece(source, part[0].start, part[0].stop - part[0].start, columns, target)


def copies(pieces: Sequence[Piece], chunk: int = CHUNK) -> list[Copy]:
    """Pieces in file order, cut to `chunk` bytes and joined where one begins as another ends and
    both go the same way."""
    cut = [part for whole in pieces for part in whole.split(chunk)]
    cut.sort(key=lambda p: (p.source.file, p.start))
    groups: list[list[Piece]] = []
    size = 0
    for part in cut:
        last = groups[-1][-1] if groups else None
        joins = (
            last is not None
            and last.source.file == part.source.file
            and last.start + last.nbytes == part.start
            and last.direct == part.direct
            and size + part.nbytes <= chunk
            and len(groups[-1]) < _MOST_PIECES
        )
        if joins:
            groups[-1].append(part)
            size += part.nbytes
        else:
            groups.append([part])
            size = part.nbytes
    return [Copy(tuple(group)) for group in groups]


@dataclass
class Loader:
    """Runs jobs once each. `run` may be called again after it failed: it goes on with the rest."""

    jobs: list[Job]
    threads: int = THREADS
    done: set[int] = field(default_factory=set)  # positions in `jobs`

    def __post_init__(self) -> None:
        self.jobs.sort(key=lambda job: (job.file, job.start))
        self._files: dict[Path, int] = {}
        self._stale: list[int] = []
        self._lock = threading.Lock()
        self._local = threading.local()
        staged = (j for j in self.jobs if isinstance(j, Copy) and not j.pieces[0].direct)
        largest = max((job.nbytes for job in staged), default=1)
        self._staging = -(-largest // 4096) * 4096

    @property
    def total(self) -> int:
        """Bytes that all jobs read."""
        return sum(job.nbytes for job in self.jobs)

    def run(self, bar: ProgressBar | None = None) -> None:
        """Raises CheckpointError that names every file that could not be read; what could be is
        kept."""
        left = [i for i in range(len(self.jobs)) if i not in self.done]
        failed: dict[Path, OSError] = {}
        count = max(1, min(self.threads, len(left)))
        try:
            with ThreadPoolExecutor(count, thread_name_prefix="load") as pool:
                running: dict[Future[None], int] = {}
                for i in left:
                    running[pool.submit(self._attempt, self.jobs[i])] = i
                    if len(running) == 2 * count:
                        self._collect(running, failed, bar)
                while running:
                    self._collect(running, failed, bar)
        finally:
            self._close()
        if failed:
            names = ", ".join(f"{file.name} ({error})" for file, error in sorted(failed.items()))
            raise CheckpointError(
                f"cannot be read after {ATTEMPTS} attempts: {names}; "
                f"{len(self.done)} of {len(self.jobs)} ranges of all files are loaded"
            )

    def _collect(
        self,
        running: dict[Future[None], int],
        failed: dict[Path, OSError],
        bar: ProgressBar | None,
    ) -> None:
        ended, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in ended:
            i = running.pop(future)
            try:
                future.result()
            except OSError as error:
                failed[self.jobs[i].file] = error
                continue
            self.done.add(i)
            if bar is not None:
                bar.add(self.jobs[i].nbytes)

    @torch.inference_mode()  # a thread's own setting; the targets may have been made in it
    def _attempt(self, job: Job) -> None:
        for attempt in range(ATTEMPTS):
            try:
                if isinstance(job, Copy):
                    self._copy(job)
                else:
                    self._convert(job)
                return
            except OSError:
                self._forget(job.file)
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE * 2**attempt)

    def _copy(self, job: Copy) -> None:
        if job.pieces[0].direct:
            self._read(job.file, job.start, [part.target for part in job.pieces])
            return
        device = job.pieces[0].target.device
        buffer = self._buffer(device)[: job.nbytes]
        self._read(job.file, job.start, [buffer])
        with self._stream(device):
            for part in job.pieces:
                begin = part.start - job.start
                numbers = _typed(buffer[begin : begin + part.nbytes], part)
                if numbers.dtype != part.target.dtype or part.columns is not None:
                    # Converted and cut where that is fast; the temporary holds whole rows.
                    numbers = numbers.to(device, non_blocking=True)
                if part.columns is not None:
                    numbers = numbers[:, part.columns]
                part.target.copy_(numbers, non_blocking=True)

    def _convert(self, job: Convert) -> None:
        raw: dict[str, Tensor] = {}
        with self._stream(job.device):
            for role, part in job.parts.items():
                source = job.weight.parts[role]
                whole = piece(source, part, torch.empty(0))
                buffer = torch.empty(whole.nbytes, dtype=torch.uint8)
                self._read(source.file, whole.start, [buffer])
                numbers = _typed(buffer, whole).to(job.device)
                raw[role] = numbers if whole.columns is None else numbers[:, whole.columns]
            job.finish(raw)

    def _read(self, file: Path, start: int, targets: list[Tensor]) -> None:
        """Fills the contiguous targets one after the other; OSError says where it went wrong."""
        left = [memoryview(t.view(torch.uint8).numpy()).cast("B") for t in targets]  # type: ignore[arg-type]
        handle = self._open(file)
        while left:
            count = os.preadv(handle, left, start)
            if count == 0:
                raise OSError(f"ends at byte {start}")
            start += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[file]

    def _forget(self, file: Path) -> None:
        """The next attempt opens the file anew; others that still read keep their handle."""
        with self._lock:
            handle = self._files.pop(file, None)
            if handle is not None:
                self._stale.append(handle)

    def _close(self) -> None:
        for handle in [*self._files.values(), *self._stale]:
            with contextlib.suppress(OSError):
                os.close(handle)
        self._files.clear()
        self._stale.clear()

    def _buffer(self, device: torch.device) -> Tensor:
        """The thread's staging memory: `_staging` bytes, pinned for CUDA."""
        if not hasattr(self._local, "buffer"):
            pin = device.type == "cuda"
            self._local.buffer = torch.empty(self._staging, dtype=torch.uint8, pin_memory=pin)
        buffer: Tensor = self._local.buffer
        return buffer

    @contextlib.contextmanager
    def _stream(self, device: torch.device) -> Iterator[None]:
        """The thread's own stream; what was put on it is done at the end."""
        if device.type != "cuda":
            yield
            return
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._local.stream):
            yield
        self._local.stream.synchronize()


def _typed(buffer: Tensor, part: Piece) -> Tensor:
    """The bytes of whole rows as numbers."""
    if buffer.storage_offset() % ITEM_BYTES[part.source.dtype]:
        buffer = buffer.clone()
    return buffer.view(DTYPES[part.source.dtype]).view(part.rows, *part.source.shape[1:])
