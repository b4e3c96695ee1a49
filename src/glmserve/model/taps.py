# SPDX-License-Identifier: Apache-2.0
"""`Taps`: what each layer computed, kept when somebody asks (tests, `glmserve logits`).

Off while serving. The tensors are those of this rank, which are the same on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glmserve.model.step import Selection, Step


@dataclass(frozen=True)
class Routing:
    """The router's decision: experts ascending, weights normed and scaled."""

    ids: Tensor  # [R, k] int64
    weights: Tensor  # [R, k] acc


class Taps:
    """Lists in layer order, filled by the layers."""

    def __init__(self) -> None:
        self.hidden: list[Tensor] = []  # [R, D] residual stream after each layer
        self.selections: list[Selection] = []  # of each layer; shared layers repeat their group's
        self.routing: list[Routing] = []  # of each routed layer
        self.moe_layers: list[int] = []

    def selected(self, own: Selection, step: Step) -> Selection:
        """What a layer that scored goes on with. Its own choice; a test may force another."""
        return own

    def routed(self, own: Routing) -> Routing:
        """What a routed layer goes on with, likewise."""
        return own

    def record(self, hidden: Tensor, selection: Selection, routing: Routing | None) -> None:
        if routing is not None:
            self.routing.append(routing)
            self.moe_layers.append(len(self.hidden))
        self.hidden.append(hidden)
        self.selections.append(selection)

    def tensors(self) -> dict[str, Tensor]:
        """Stacked: hidden_layers [L, R, D], selected [L, R, k] int32 positions (-1 unused),
        moe_layers [M], router_experts [M, R, top_k], router_weights [M, R, top_k]."""
        stacked = {
            "hidden_layers": torch.stack(self.hidden),
            "selected": torch.stack([s.positions for s in self.selections]),
            "moe_layers": torch.tensor(self.moe_layers),
        }
        if self.routing:
            stacked["router_experts"] = torch.stack([r.ids for r in self.routing])
            stacked["router_weights"] = torch.stack([r.weights for r in self.routing])
        return stacked
