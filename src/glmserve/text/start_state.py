# SPDX-License-Identifier: Apache-2.0
"""The parser's first state, read from the end of the prompt: never from request flags.

Only what follows the last role marker counts: an open <think> means reasoning, a closed one means
content, a bare assistant marker leaves it open. Any other ending is not an assistant's turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from glmserve.text import markers
from glmserve.text.output_options import ParserStart
from glmserve.text.tokenizer import Ids, Tokenizer

_TAIL_MARKERS = (*markers.ROLES, markers.THINK, markers.THINK_END)
_TAIL_PATTERN = re.compile("|".join(map(re.escape, _TAIL_MARKERS)))


@dataclass(frozen=True)
class StartState:
    """First state, and whether text of the answer stands before it (continued answers)."""

    start: ParserStart
    mid_text: bool


def start_of_text(text: str) -> StartState:
    """State after the end of a rendered prompt; a tail without a role is an assistant's."""
    role, last, end = markers.ASSISTANT, None, 0
    for match in _TAIL_PATTERN.finditer(text):
        if match.group() in markers.ROLES:
            role, last = match.group(), None
        else:
            last = match.group()
        end = match.end()
    return _state(role, last, bool(text[end:].strip()))


def start_of_ids(tokenizer: Tokenizer, ids: Ids) -> StartState:
    """State after a prompt's ids; needs no text, so text that spells a marker does not count."""
    names = {
        token: name for name in _TAIL_MARKERS if (token := tokenizer.marker_id(name)) is not None
    }
    (found,) = np.isin(ids, np.fromiter(names, np.int32)).nonzero()
    literals: Iterable[str] = (names[int(ids[place])] for place in found)
    role, last = None, None
    for literal in literals:
        if literal in markers.ROLES:
            role, last = literal, None
        else:
            last = literal
    rest = ids[found[-1] + 1 :] if len(found) else ids
    return _state(role, last, bool(tokenizer.decode(rest).strip()))


def _state(role: str | None, last: str | None, text_follows: bool) -> StartState:
    if role != markers.ASSISTANT:
        return StartState("off", False)
    if last == markers.THINK:
        return StartState("reasoning", text_follows)
    if last == markers.THINK_END:
        return StartState("content", text_follows)
    return StartState("content", True) if text_follows else StartState("auto", False)
