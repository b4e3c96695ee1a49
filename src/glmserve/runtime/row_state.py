# SPDX-License-Identifier: Apache-2.0
"""Per-row state that lives on the ranks and advances there (DESIGN §3.1).

A row is a running sequence. The engine only sends what it decides (rows in, pages, prompt
tokens); lengths, last tokens, drafts, what remains and whether a row still runs follow from the
draws, which are identical on every rank, so every rank keeps an identical copy. The tables have
one line more than there are rows: the padding row, whose pages are all the scratch page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from glmserve.config import EngineConfig
from glmserve.kernels.row_state import columns, put_rows
from glmserve.messages import DraftScript, PageGrant, RowInit
from glmserve.runtime.sampler import SamplingRows
from glmserve.runtime.uploads import upload
from glmserve.sampling_params import MAX_STOP_TOKENS

# A request's own ids and as many eos ids of the checkpoint.
assert columns.MAX_STOPS >= MAX_STOP_TOKENS + 16
_SIGN_64 = 1 << 63
_TEMPERATURE, _TOP_P, _MIN_P, _REALS = 0, 1, 2, 4  # columns of the table of real numbers


class RowState:
    """Tables on the device of the model, and what the host knows of the same rows."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        lines = config.max_rows + 1
        self.device, self.drafts, self.padding = device, config.drafts, config.max_rows
        self.table = torch.zeros(lines, columns.width(config.drafts), dtype=torch.int64)
        self.table[:, columns.STOPS : columns.DRAFTS] = -1
        self.table = self.table.to(device)
        self.reals = torch.zeros(lines, _REALS, dtype=torch.float64, device=device)
        self.temperature = self.reals[:, _TEMPERATURE]  # 0 = greedy
        self.top_p, self.min_p = self.reals[:, _TOP_P], self.reals[:, _MIN_P]
        self.top_k, self.seeds = self.table[:, columns.TOP_K], self.table[:, columns.SEED]
        self.stops = self.table[:, columns.STOPS : columns.DRAFTS]
        self.stops_from = self.table[:, columns.STOPS_FROM]
        self.page_table = torch.full(
            (lines, config.pages_per_row), config.num_pages - 1, dtype=torch.int32, device=device
        )
        self.no_tokens = torch.empty(0, dtype=torch.int64, device=device)
        # The host's side: alternatives to report with each token, and test drafts.
        self.logprobs: dict[int, int] = {}
        self.prompt_logprobs: dict[int, int] = {}
        self.scripts: dict[int, tuple[int, DraftScript]] = {}  # row -> prompt length, test drafts

    def admit(self, inits: Sequence[RowInit], grants: Sequence[PageGrant]) -> None:
        """Puts sequences into rows (they decode once their prompts are computed) and pages into
        page tables. What a page-table line held before is left: nothing reads past the grants."""
        if inits:
            self._enter(inits)
        if grants:
            width = self.page_table.shape[1]
            entries = [
                np.arange(grant.start, grant.start + len(grant.pages), dtype=np.int64)
                + grant.row * width
                for grant in grants
            ]
            pages = np.concatenate([grant.pages for grant in grants])
            where, new = upload([np.concatenate(entries), pages[:, None]], self.device)
            put_rows(self.page_table.view(-1, 1), where, new)

    def _enter(self, inits: Sequence[RowInit]) -> None:
        """Puts sequences into rows."""
        lines = np.zeros((len(inits), self.table.shape[1]), dtype=np.int64)
        reals = np.zeros((len(inits), _REALS), dtype=np.float64)
        for line, real, init in zip(lines, reals, inits, strict=True):
            self._fill(line, real, init)
        entering = np.array([init.row for init in inits], dtype=np.int64)
        rows, new, real = upload([entering, lines, reals], self.device)
        put_rows(self.table, rows, new)
        put_rows(self.reals, rows, real)

    def _fill(self, line: np.ndarray, real: np.ndarray, init: RowInit) -> None:  # type: ignore[type-arg]
        line[columns.REMAINING] = init.remaining
        # The same 64 bits as a signed number: torch has no uint64 arithmetic.
        line[columns.SEED] = init.seed - 2 * _SIGN_64 if init.seed >= _SIGN_64 else init.seed
        line[columns.TOP_K] = init.top_k
        line[columns.STOPS_FROM] = init.stops_from
        assert len(init.stop_token_ids) <= columns.MAX_STOPS, init
        line[columns.STOPS : columns.DRAFTS] = -1
        line[columns.STOPS : columns.STOPS + len(init.stop_token_ids)] = init.stop_token_ids
        real[_TEMPERATURE], real[_TOP_P], real[_MIN_P] = init.temperature, init.top_p, init.min_p
        for asked, kept in (
            (init.logprobs, self.logprobs),
            (init.prompt_logprobs, self.prompt_logprobs),
        ):
            kept.pop(init.row, None)
            if asked is not None:
                kept[init.row] = asked
        self.scripts.pop(init.row, None)
        if init.draft_script is not None:
            self.scripts[init.row] = (init.prompt_length, init.draft_script)

    def lengths(self, rows: Tensor) -> Tensor:
        """Known tokens of `rows` [R]."""
        return self.table[rows, columns.LENGTH]

    def sampling(self, rows: Tensor, positions: Tensor) -> SamplingRows:
        """Settings for drawing the tokens at `positions` [R] of `rows` [R]."""
        return SamplingRows(
            self.temperature, self.top_p, self.top_k, self.min_p, self.seeds, rows, positions
        )
