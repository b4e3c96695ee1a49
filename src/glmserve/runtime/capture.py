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
from glmserve.model.taps import Taps
from glmserve.parallel.group import Group


class Capture:
    """Collects one step at a time: `begin`, then `drafts` for each way of drafting, then `end`."""

    def __init__(self, directory: str, group: Group) -> None:
        self.directory = Path(directory)
        self.group = group
        self.step = 0
        self.taps = Taps()
        self.drafted: dict[str, Tensor] = {}

    def begin(self) -> Taps:
        self.taps, self.drafted = Taps(), {}
        return self.taps

    def drafts(self, share: bool, tokens: list[Tensor], logits: list[Tensor]) -> None:
        """Keeps k draft tokens [S] and logits shards [S, V/N], under the golden's names."""
        self.drafted[f"mtp_draft_tokens_share{share:d}"] = torch.stack(tokens, dim=1)
        self.drafted[f"mtp_draft_logits_share{share:d}"] = torch.stack(
            [self._gather(shard) for shard in logits], dim=1
        )

    def end(self, batch: StepBatch, hidden: Tensor, logits: Tensor, padding: int) -> None:
        """Gathers the logits shard [R, V/N] of every row and writes the step, less the rows of
        sequence `padding`."""
        logits = self._gather(logits)
        if self.group.rank == 0:
            kept = batch.row_seq != padding
            arrays = {
                "rows": batch.row_seq[kept],
                "positions": batch.positions[kept],
                "logits": logits[kept],
                "final_hidden": hidden[kept],
                **self.drafted,
                **{
                    # Taps are [layers, R, ..], and the list of routed layers.
                    key: value[:, kept] if value.dim() > 1 else value
                    for key, value in self.taps.tensors().items()
                },
            }
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
