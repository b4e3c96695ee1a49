# SPDX-License-Identifier: Apache-2.0
"""The released model at full size, headers only: each byte has its ranks, the sums are right."""

from __future__ import annotations

import shutil
from collections import Counter

import numpy as np
import pytest
import torch

from glmserve.checkpoint.declared import CONFIGS, Source, open_source
from glmserve.checkpoint.formats import Part, StoredWeight
from glmserve.checkpoint.placement import Form, held_weights, memory_bytes, stored_bytes
from glmserve.checkpoint.weights import allocate
from glmserve.model_config import ExpertLayout, ModelConfig
from tests.checkpoint.released import write_headers
from tests.test_model_config import GLM_5_2

TOTAL = 755_617_140_416  # published bytes of all tensors


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Source:
    directory = tmp_path_factory.mktemp("released")
    shutil.copy(CONFIGS / "glm-5.2-fp8.json", directory / "config.json")
    assert write_headers(directory) == TOTAL
    return open_source(str(directory))


def test_the_built_in_configs_are_the_released_model() -> None:
    plain = ModelConfig.from_file(CONFIGS / "glm-5.2.json")
    assert plain == ModelConfig.from_dict(GLM_5_2)
    fp8 = ModelConfig.from_file(CONFIGS / "glm-5.2-fp8.json")
    assert fp8.quant_method == "fp8"


def test_the_release_has_the_published_tensors(released: Source) -> None:
    assert released.headers is not None
    assert len(released.headers.tensors) == 118_629
    assert len(released.headers.digests) == 141
    assert sum(t.nbytes for t in released.headers.tensors.values()) == TOTAL


def test_what_the_config_declares_is_what_the_release_stores(released: Source) -> None:
    declared = open_source("glm-5.2-fp8").weights
    assert declared.keys() == released.weights.keys()
    for name, weight in released.weights.items():
        want = declared[name]
        assert weight.scheme is want.scheme
        for role, tensor in weight.parts.items():
            assert (tensor.dtype, tensor.shape) == (want.parts[role].dtype, want.parts[role].shape)


def count_owners(weight: StoredWeight, parts: list[Part]) -> dict[str, list[int]]:
    """How often the ranks' slices cover the rows and the columns of each stored part."""
    owners = {}
    for role, tensor in weight.parts.items():
        shape = tensor.shape if len(tensor.shape) == 2 else (tensor.shape[0], 1)
        rows, columns = (np.zeros(n, dtype=int) for n in shape)
        for part in parts:
            sliced = weight.slices(part)[role]
            rows[sliced[0]] += 1
            columns[sliced[1] if len(sliced) == 2 else slice(None)] += 1
        owners[role] = [int(f) for n in (rows, columns) for f in (n.min(), n.max())]
    return owners


@pytest.mark.parametrize("layout", ["ep", pytest.param("sliced", marks=pytest.mark.slow)])
def test_every_byte_belongs_to_one_rank_or_to_all(released: Source, layout: ExpertLayout) -> None:
    held = [held_weights(released.config, released.weights, r, 8, layout, True) for r in range(8)]
    copies: Counter[int] = Counter()  # bytes by the number of ranks that read them
    seen: dict[str, dict[str, list[int]]] = {}  # most experts are cut alike
    for name, weight in released.weights.items():
        parts = [h[name].part for h in held if name in h]
        alike = str((weight.scheme, weight.shape, parts))
        if alike not in seen:
            seen[alike] = count_owners(weight, parts)
        for role, covered in seen[alike].items():
            low_rows, high_rows, low_columns, high_columns = covered
            assert low_rows == high_rows, (name, role)
            assert low_columns == high_columns, (name, role)
            # A tensor cut along one side is whole along the other on every rank.
            times = min(low_rows, low_columns)
            assert times in (1, 8), (name, role)
            copies[times] += weight.parts[role].nbytes
    assert copies[1] + copies[8] == TOTAL
    read = [stored_bytes(h) for h in held]
    assert len(set(read)) == 1
    assert sum(read) == copies[1] + 8 * copies[8]


def test_a_rank_reads_what_the_ledger_says(released: Source) -> None:
    c = released.config
    target = stored_bytes(held_weights(c, released.weights, 3, 8, "ep", True, mtp=False))
    with_mtp = stored_bytes(held_weights(c, released.weights, 3, 8, "ep", True))
    assert target / 1e9 == pytest.approx(94.68, abs=0.005)
    assert with_mtp / 1e9 == pytest.approx(95.96, abs=0.005)


def test_projections_and_experts_stay_in_fp8(released: Source) -> None:
    for layout in ("ep", "sliced"):
        held = held_weights(released.config, released.weights, 7, 8, layout, True)
        forms = {
            name.split(".", 3)[-1]: weight.form for name, weight in held.items() if ".6." in name
        }
        kept = {name for name, form in forms.items() if form is Form.BLOCK_FP8}
        attention = ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj", "indexer.wq_b"]
        assert {f"self_attn.{name}.weight" for name in attention} <= kept
        assert all(name in kept for name in forms if ".experts." in name or "shared" in name)
        assert forms["self_attn.kv_b_proj.weight"] is Form.PLAIN
        assert forms["self_attn.indexer.wk.weight"] is Form.PLAIN


@pytest.mark.parametrize("layout", ["ep", "sliced"])
@pytest.mark.parametrize(("keep", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_allocated_bytes_are_those_of_the_shapes(
    released: Source, layout: ExpertLayout, keep: bool, dtype: torch.dtype
) -> None:
    held = held_weights(released.config, released.weights, 5, 8, layout, keep)
    weights, views = allocate(released.config, held, dtype, "meta")
    assert weights.parameter_bytes == memory_bytes(held, dtype.itemsize)
    assert views.keys() == held.keys()
    if keep:  # kv_b and wk in bf16 are all that grows
        grown = weights.parameter_bytes - stored_bytes(held)
        assert 0.13e9 < grown < 0.19e9
