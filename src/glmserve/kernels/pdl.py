# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch (PTX griddepcontrol): a kernel's programs start while the kernel
before it still runs, and wait inside for its end.

A kernel that is launched with `**pdl()` calls, in every program, those that leave early too,

    let_next_start()       as early as it likes: our dependents may take their places
    wait_for_previous()    before it touches what earlier kernels write, or writes what they touch

(`triton_common`). Before the wait it may read what no kernel of a step writes: weights, tables. A
kernel that is bound by its own reads lets the next start late: its weights would be in their way.
Without the launch option the wait does nothing, so a kernel has one compiled form either way; one
that is always launched plainly may let the next start and needs no wait.
"""

from __future__ import annotations

_options = {"launch_pdl": True}
_PLAIN = {"launch_pdl": False}
_MANY = 8192  # programs of a kernel that is measured to be slower for it: short ones, in many waves


def pdl(programs: int = 0) -> dict[str, bool]:
    """Launch options of a kernel that follows the rule above; of one whose short programs lose more
    by asking than the early start is worth where there are many `programs`."""
    return _PLAIN if programs > _MANY else _options


def use_pdl(wanted: bool) -> None:
    """Turns it on (as at first) or off for all launches that follow. Captured graphs stay as they
    are."""
    _options["launch_pdl"] = wanted
