# SPDX-License-Identifier: Apache-2.0
"""JSON from clients: standard JSON only, of limited depth, with errors that name the field.

What it lets through can be rendered, copied and written again without surprises. Shapes are
checked by `chat_request`.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from glmserve.errors import InvalidInput

MAX_DEPTH = 64


def loads(field: str, source: str) -> Any:
    """The value of a JSON text; raises InvalidInput naming `field`."""
    try:
        value = json.loads(source, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(field, source, f"not valid JSON: {error}") from None
    check_depth(field, value)
    return value


def check_depth(field: str, value: Any) -> None:
    """Refuse values nested deeper than MAX_DEPTH: later stages walk them recursively."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not inner:
            return
        level = inner
    raise InvalidInput(field, "...", f"nested deeper than {MAX_DEPTH} levels")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
