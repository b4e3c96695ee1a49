# SPDX-License-Identifier: Apache-2.0
"""In what form a rank keeps each weight in memory, and the bytes that this takes; no torch here.

Kept as stored, where a kernel reads it so: block-fp8 projections and experts, int4 experts. The
rest is de-quantised to the model's dtype when it is read: kv_b (absorbed per head), the indexer's
wk (beside its bf16 weights_proj), all integers outside experts, and what a rank's slice or the
stacking of several weights would cut inside a 128-block, a group or a word.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from glmserve.checkpoint.formats import BLOCK, Part, Scheme, StoredWeight
from glmserve.checkpoint.layout import checkpoint_tensors, local_slice
from glmserve.model_config import ExpertLayout, ModelConfig

INT4_GROUPS = (32, 64, 128)  # columns of a scale that the int4 kernel reads
_WORD = 8  # nibbles of a word


class Form(enum.Enum):
    """How a weight lies in memory."""

    PLAIN = "plain"  # the model's dtype
    WIDE = "wide"  # fp32, or wider if the model is
    BLOCK_FP8 = "block-fp8"
    INT4 = "int4"


@dataclass(frozen=True)
class Held:
    """A rank's part of one weight."""

    part: Part  # of the whole weight
    form: Form
    stored: StoredWeight

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(s.stop - s.start for s in self.part)

    def memory_bytes(self, item: int) -> int:
        """Bytes in memory when the model's dtype has `item` bytes."""
        count = math.prod(self.shape)
        if self.form is Form.PLAIN:
            return count * item
        if self.form is Form.WIDE:
            return count * max(item, 4)
        rows, columns = self.shape
        if self.form is Form.BLOCK_FP8:
            return count + 4 * -(-rows // BLOCK) * (columns // BLOCK)
        groups = columns // self.stored.group
        zeros = rows // _WORD * groups * 4 if "zeros" in self.stored.parts else 0
        return count // 2 + rows * groups * 2 + zeros

    def stored_bytes(self) -> int:
        """Bytes of the checkpoint that this part is made from."""
        total = 0
        for role, part in self.stored.slices(self.part).items():
            tensor = self.stored.parts[role]
            share = math.prod(s.stop - s.start for s in part)
            total += share * (tensor.nbytes // math.prod(tensor.shape))
        return total


def held_weights(
    config: ModelConfig,
    stored: Mapping[str, StoredWeight],
    rank: int,
    size: int,
    layout: ExpertLayout,
    keep: bool,
    mtp: bool = True,
) -> dict[str, Held]:
    """What `rank` of `size` holds of each weight. keep: quantised weights stay as they are stored
    where that is possible (bf16 on CUDA), else everything is plain."""
    specs = checkpoint_tensors(config, mtp)
    held: dict[str, Held] = {}
    for name, spec in specs.items():
        part = local_slice(spec, config, rank, size, layout)
        if part is None:
            continue
        form = Form.PLAIN
        if spec.wide:
            # The router reads a bf16 gate as the same numbers at half the bytes.
            values = stored[name].parts["values"]
            narrow = keep and name.endswith("mlp.gate.weight") and values.dtype == "BF16"
            form = Form.PLAIN if narrow else Form.WIDE
        held[name] = Held(part, form, stored[name])
    if keep:
        for layer in range(config.num_hidden_layers + (config.num_mtp_layers if mtp else 0)):
            _keep_layer(config, held, layer)
    return held


def _keep_layer(config: ModelConfig, held: dict[str, Held], layer: int) -> None:
    prefix = f"model.layers.{layer}."
    attention = prefix + "self_attn."
    stacks = [["q_a_proj", "kv_a_proj_with_mqa"], ["q_b_proj"], ["o_proj"]]
    stacks += [["indexer.wq_b"]] if config.is_full(layer) else []
    for stack in stacks:
        _keep(held, [f"{attention}{name}.weight" for name in stack], Form.BLOCK_FP8)
    ffn = prefix + ("mlp.shared_experts." if config.is_moe(layer) else "mlp.")
    _keep(held, [f"{ffn}{name}_proj.weight" for name in ("gate", "up")], Form.BLOCK_FP8)
    _keep(held, [f"{ffn}down_proj.weight"], Form.BLOCK_FP8)
    experts = prefix + "mlp.experts."
    names = [
        f"{experts}{e}.{name}_proj.weight"
        for e in range(config.n_routed_experts)
        for name in ("gate", "up", "down")
        if config.is_moe(layer) and f"{experts}{e}.down_proj.weight" in held
    ]
    # One kernel runs a layer's experts: all of them have the same form.
    if names and not _keep(held, names, Form.BLOCK_FP8):
        _keep(held, names, Form.INT4)


def _keep(held: dict[str, Held], names: list[str], form: Form) -> bool:
    """Gives the named weights, which are stacked, the form if all of them fit it."""
    weights = [held[name] for name in names]
    if form is Form.BLOCK_FP8:
        fits = all(_fits_block_fp8(w, last=w is weights[-1]) for w in weights)
    else:
        zeros = {"zeros" in w.stored.parts for w in weights}
        groups = {w.stored.group for w in weights}
        fits = len(zeros) == len(groups) == 1 and all(_fits_int4(w) for w in weights)
    if fits:
        held.update({name: Held(held[name].part, form, held[name].stored) for name in names})
    return fits


def _fits_block_fp8(weight: Held, last: bool) -> bool:
    if weight.stored.scheme is not Scheme.BLOCK_FP8:
        return False
    rows, columns = weight.part
    whole_rows = (rows.stop - rows.start) % BLOCK == 0 or last
    return whole_rows and not (rows.start % BLOCK or columns.start % BLOCK or columns.stop % BLOCK)


def _fits_int4(weight: Held) -> bool:
    stored = weight.stored
    if stored.scheme not in (Scheme.PACKED, Scheme.AWQ) or stored.bits != 4:
        return False
    if stored.parts["scales"].dtype not in ("BF16", "F16"):
        return False
    rows, columns = weight.part
    whole = not any(n % _WORD for n in (rows.start, rows.stop))
    return (
        whole
        and stored.group in INT4_GROUPS
        and not (columns.start % stored.group or columns.stop % BLOCK or columns.start % BLOCK)
    )


def stored_bytes(held: Mapping[str, Held]) -> int:
    """Bytes of the checkpoint that a rank reads, scales included."""
    return sum(weight.stored_bytes() for weight in held.values())


def memory_bytes(held: Mapping[str, Held], item: int) -> int:
    """Bytes of parameters in memory, computed from shapes alone."""
    return sum(weight.memory_bytes(item) for weight in held.values())
