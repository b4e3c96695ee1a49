# SPDX-License-Identifier: Apache-2.0
"""Which form of an operator runs: Triton on CUDA tensors, the reference elsewhere.

A kernel serves named dimensions only. What it does not serve is refused by name, or runs on the
reference where the user asked for that (`allow_reference`). The answer depends on device, shapes
and dtypes alone, so a captured graph never meets another form.
"""

from __future__ import annotations

_reference_allowed = False


class UnservedShape(ValueError):
    """No Triton kernel serves the named dimensions of an operator."""


def allow_reference(allowed: bool) -> None:
    """Lets operators on CUDA tensors fall back to plain torch where no kernel serves them.

    Call it before the first forward pass: a captured graph keeps the forms that it was made with.
    """
    global _reference_allowed
    _reference_allowed = allowed


def use_kernel(operator: str, device_type: str, unserved: dict[str, object]) -> bool:
    """True: launch the Triton kernel. False: run the reference.

    unserved: the dimensions that the kernel does not serve, name -> offending value.
    """
    if device_type != "cuda":
        return False
    if not unserved:
        return True
    if _reference_allowed:
        return False
    names = ", ".join(f"{name}={value}" for name, value in unserved.items())
    raise UnservedShape(f"{operator}: no Triton kernel for {names}")
