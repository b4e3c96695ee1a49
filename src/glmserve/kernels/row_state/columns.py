# SPDX-License-Identifier: Apache-2.0
"""The line that a device row has in the table of integers: which column holds what."""

from __future__ import annotations

LENGTH = 0  # tokens known, the last one not yet in the caches
LAST_TOKEN = 1
REMAINING = 2  # tokens that the row may still draw
ACTIVE = 3  # 1 while the row decodes
SEED = 4
TOP_K = 5
STOPS_FROM = 6  # first position at which a stop id may be drawn
STOPS = 8  # ids that end the row, padded with -1
MAX_STOPS = 32
DRAFTS = STOPS + MAX_STOPS  # k columns: drafts of the tokens after LAST_TOKEN


def width(drafts: int) -> int:
    """Columns of a line, a whole number of 64 B."""
    return -(-(DRAFTS + drafts) // 8) * 8


# Columns of a step's sequences, int64 [S, SEQUENCE_WIDTH].
ROW = 0  # the device row
FIRST_ROW = 1  # number of its first drawing row among the step's rows; -1 = nothing to do
FIRST_DRAW = 2  # and among the drawn ones
PROMPT_END = 3  # length of the prompt that ends in this step; -1 = the sequence decodes
SEQUENCE_WIDTH = 4

# Columns of a step's results, int32 [sequences, result_width]: how many tokens are confirmed, why
# the row ends, k + 1 drawn tokens, k new drafts.
COUNT = 0
FLAGS = 1
TOKENS = 2
STOPPED = 1  # bits of FLAGS
EXHAUSTED = 2


def result_width(drafts: int) -> int:
    return TOKENS + 2 * drafts + 1


# A slot of results on the host, int32: the result's number (1, 2, ..), and from here on its rows.
SLOT_HEAD = 4
