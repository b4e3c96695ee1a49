# SPDX-License-Identifier: Apache-2.0
"""Records what a step computed, for `glmserve logits` and tests; never on while serving.

Every rank takes part (logits are gathered over the vocabulary shards), rank 0 writes one
`step-NNNNNN.npz` a step. Rows are in packed order; `rows` and `positions` say what they are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from glmserve.model.batch import StepBatch
from glmserve.model.decoder import Decoder
from glmserve.model.taps import Taps
from glmserve.parallel.group import Group
from glmserve.runtime.row_state import RowState


class Capture:
    def __init__(self, directory: str, group: Group) -> None:
        self.directory = Path(directory)
        self.group = group
        self.step = 0
        self.taps = Taps()
        self.draft_logits: list[Tensor] = []

    def begin(self) -> Taps:
        self.taps, self.draft_logits = Taps(), []
        return self.taps

    def draft(self, _decoder: Decoder, shard: Tensor) -> None:
        """Keeps the logits of one draft pass, [N, V/N] on this rank."""
        self.draft_logits.append(self._gather(shard))

    def end(
        self,
        batch: StepBatch,
        hidden: Tensor,
        decoder: Decoder,
        sampled: Tensor,
        state: RowState,
    ) -> None:
        """Gathers and writes the step."""
        logits = self._gather(decoder.logits(hidden))
        if self.group.rank == 0:
            arrays = {
                "rows": batch.row_seq,
                "positions": batch.positions,
                "logits": logits,
                "final_hidden": hidden,
                "sampled": sampled,
                "drafts": state.drafts[sampled],
            }
            if self.draft_logits:
                arrays["draft_logits"] = torch.stack(self.draft_logits, dim=1)  # [N, k, V]
            arrays |= self.taps.tensors()
            np.savez(
                self.directory / f"step-{self.step:06d}.npz",
                **{key: _to_numpy(value) for key, value in arrays.items()},
            )
        self.step += 1

    def _gather(self, shard: Tensor) -> Tensor:
        return torch.cat(list(self.group.all_gather(shard)), dim=1)  # [rows, V]


def _to_numpy(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    wide = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return wide.detach().cpu().numpy()
