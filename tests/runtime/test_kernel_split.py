# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes, from what a profiler saw."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import glmserve.kernels
from glmserve.runtime.kernel_split import GAPS, charges, operator_of, operators, sections, split

US = 1000
EVENTS = [
    ("one_shot", 0, 5 * US),
    ("attend", 6 * US, 10 * US),  # a gap of 1 us
    ("look_up", 9 * US, 12 * US),  # starts early: charged from 10
    ("one_shot", 12 * US, 14 * US),
    ("attend", 14 * US, 20 * US),
    ("look_up", 15 * US, 18 * US),  # ends in the shadow of the one before
    ("one_shot", 20 * US, 21 * US),
    ("Memcpy DtoD", 21 * US, 22 * US),
]


def test_kernels_have_the_operators_of_their_folders() -> None:
    assert operator_of("one_shot") == "boundary"
    assert operator_of("attend") == "sparse_mla"
    assert operator_of("Memset (Device)") == "copies"
    assert operator_of("at::native::something") == "torch"


def test_every_jitted_function_is_known_however_its_decorator_is_written() -> None:
    root = Path(str(glmserve.kernels.__file__)).parent
    jitted = {
        node.name
        for source in root.rglob("*.py")
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any(".jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert jitted == set(operators())


def test_charges_and_gaps_add_up_to_the_step() -> None:
    found = split(charges(reversed(EVENTS)))
    assert found["boundary"] == pytest.approx(0.008)
    assert found["sparse_mla"] == pytest.approx(0.010)
    assert found["slot_lookup"] == pytest.approx(0.002)
    assert found[GAPS] == pytest.approx(0.001)
    assert sum(found.values()) == pytest.approx(0.022)


def test_equal_sections_are_averaged() -> None:
    first, second, third = sections(charges(EVENTS))
    assert (first.count, [k.name for k in first.kernels]) == (2, ["attend", "look_up", "one_shot"])
    assert [k.us for k in first.kernels] == pytest.approx([5.0, 1.0, 1.5])
    assert first.us == pytest.approx(8.0)  # the gap's mean is 0.5
    assert (second.us, third.us) == (5.0, 1.0)
