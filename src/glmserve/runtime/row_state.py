# SPDX-License-Identifier: Apache-2.0
"""Per-row state that lives on the ranks and advances there (DESIGN §3.1).

A row is a running sequence. The engine only sends what it decides (rows in, pages, prompt
tokens); lengths, last tokens, drafts, what remains and whether a row still runs follow from the
draws, which are identical on every rank, so every rank keeps an identical copy.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from glmserve.config import EngineConfig
from glmserve.messages import DraftScript, PageGrant, RowInit
from glmserve.runtime.sampler import SamplingRows
from glmserve.sampling_params import MAX_STOP_TOKENS

_MAX_STOPS = MAX_STOP_TOKENS + 16  # a request's own and the checkpoint's eos ids
_SIGN_64 = 1 << 63


class RowState:
    """Tensors over `max_rows` rows, on the device of the model."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        rows = config.max_rows

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.length = integers(rows)  # tokens known, the last one not yet in the caches
        self.last_token = integers(rows)
        self.drafts = integers(rows, config.drafts)
        self.remaining = integers(rows)
        self.active = torch.zeros(rows, dtype=torch.bool, device=device)
        self.temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self.top_k = integers(rows)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.stops_from = integers(rows)  # first position at which a stop id may be drawn
        self.logprobs = integers(rows) - 1  # alternatives reported with each token, -1 = none
        self.prompt_logprobs = integers(rows) - 1
        self.seeds = integers(rows)
        self.stops = integers(rows, _MAX_STOPS)  # ids, padded with -1
        scratch = config.num_pages - 1
        self.page_table = torch.full(
            (rows, config.pages_per_row), scratch, dtype=torch.int32, device=device
        )
        self._scratch = scratch
        self.scripts: dict[int, tuple[int, DraftScript]] = {}  # row -> prompt length, test drafts

    def admit(self, init: RowInit) -> None:
        """Puts a sequence into a row; it becomes active when its prompt has been computed."""
        row = init.row
        self.length[row] = 0
        self.active[row] = False
        self.remaining[row] = init.remaining
        self.temperature[row] = init.temperature
        self.top_p[row] = init.top_p
        self.top_k[row] = init.top_k
        self.min_p[row] = init.min_p
        self.stops_from[row] = init.stops_from
        self.logprobs[row] = -1 if init.logprobs is None else init.logprobs
        asked = init.prompt_logprobs
        self.prompt_logprobs[row] = -1 if asked is None else asked
        # The same 64 bits as a signed number: torch has no uint64 arithmetic.
        self.seeds[row] = init.seed - 2 * _SIGN_64 if init.seed >= _SIGN_64 else init.seed
        self.stops[row] = -1
        assert len(init.stop_token_ids) <= _MAX_STOPS
        self.stops[row, : len(init.stop_token_ids)] = torch.tensor(
            init.stop_token_ids, dtype=torch.int64
        )
        self.page_table[row] = self._scratch
        self.scripts.pop(row, None)
        if init.draft_script is not None:
            self.scripts[row] = (init.prompt_length, init.draft_script)

    def grant(self, grants: Iterable[PageGrant]) -> None:
        for grant in grants:
            end = grant.start + len(grant.pages)
            self.page_table[grant.row, grant.start : end] = torch.from_numpy(grant.pages)

    def sampling(self, rows: Tensor, positions: Tensor) -> SamplingRows:
        """Settings for drawing the tokens at `positions` [R] of `rows` [R]."""
        return SamplingRows(
            self.temperature[rows],
            self.top_p[rows],
            self.top_k[rows],
            self.min_p[rows],
            self.seeds[rows],
            positions,
        )

    def advance(self, rows: Tensor, draws: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Verifies `drafts` [N, k] against `draws` [N, k + 1] and moves the rows on.

        A draft is accepted while the draw at its place equals it (DESIGN §3.2); the first draw
        that differs, or the one after the last draft, is the row's next token. The tokens are cut
        after a stop id and at `remaining`. Returns confirmed counts [N], stopped [N], exhausted
        [N]; the confirmed tokens are draws[:, :count].
        """
        accepted = (draws[:, :-1] == drafts).to(torch.int64).cumprod(dim=1).sum(dim=1)
        is_stop = (draws[:, :, None] == self.stops[rows][:, None, :]).any(dim=2)
        before_stop = (~is_stop).to(torch.int64).cumprod(dim=1).sum(dim=1)  # draws ahead of a stop
        remaining = self.remaining[rows]
        count = torch.minimum(torch.minimum(accepted, before_stop) + 1, remaining)
        stopped = before_stop < count
        exhausted = (count == remaining) & ~stopped
        self.length[rows] += count
        self.last_token[rows] = draws.gather(1, (count - 1)[:, None])[:, 0]
        self.remaining[rows] = remaining - count
        self.active[rows] = ~(stopped | exhausted)
        return count, stopped, exhausted
