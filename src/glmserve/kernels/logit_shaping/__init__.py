# SPDX-License-Identifier: Apache-2.0
"""What requests may change about a shard's logits, by tables over device rows."""

from __future__ import annotations

import torch

from ..dispatch import use_kernel
from . import reference
from .tables import LISTED, LONGEST_WORD, MOST_WORDS, NO_TOKEN, SHAPED, WORDS, ShapingTables

__all__ = [
    "LISTED",
    "LONGEST_WORD",
    "MOST_WORDS",
    "NO_TOKEN",
    "SHAPED",
    "WORDS",
    "ShapingTables",
    "confirm_tokens",
    "shape_logits",
    "shut_ids",
]


def shape_logits(
    logits: torch.Tensor,
    tables: ShapingTables | None,
    first: int,
    rows: torch.Tensor,
    positions: torch.Tensor,
    ahead: torch.Tensor,
    stops: torch.Tensor,
    stops_from: torch.Tensor,
) -> torch.Tensor:
    """Logits [M, width] of ids [first, first + width), shaped; a kernel returns a new tensor.

    rows [M] table line; positions [M] of the token to draw; ahead [M, k] drafts of this step
    ahead of it, -1 from the first that is not. stops [lines, s] ids (-1 = none) are shut at
    positions before stops_from [lines]. tables None, for the reference: nothing
    but that has been asked for.
    """
    if logits.is_cuda:
        from . import launch

        if use_kernel("logit_shaping", "cuda", launch.unserved(logits.dtype)):
            assert tables is not None, "a graph may be captured before any row asks for more"
            return launch.shape(logits, tables, first, rows, positions, ahead, stops, stops_from)
    return reference.shape(logits, tables, first, rows, positions, ahead, stops, stops_from)


def confirm_tokens(
    tables: ShapingTables,
    first: int,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Counts tokens[i, : count[i]] for table line rows[i], of those that ask for it.

    rows [S], tokens [S, k + 1] and count [S] are integers; a line with a count occurs once.
    """
    if rows.is_cuda:
        from . import launch

        launch.confirm(tables, first, rows, tokens, count)
    else:
        reference.confirm(tables, first, rows, tokens, count)


def shut_ids(
    logits: torch.Tensor, places: torch.Tensor, bits: torch.Tensor, first: int, first_word: int
) -> None:
    """-inf in logits[places[i]], in place, for the ids whose bit in bits[i] is 0.

    places [P] and bits [P, words] int32; bit t & 31 of word (t >> 5) - first_word is id t's.
    """
    if logits.is_cuda:
        from . import launch

        if use_kernel("shut_ids", "cuda", launch.unserved(logits.dtype)):
            launch.shut_ids(logits, places, bits, first, first_word)
            return
    reference.shut_ids(logits, places, bits, first, first_word)
