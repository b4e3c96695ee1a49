# SPDX-License-Identifier: Apache-2.0
"""Muon for the layers' matrices, AdamW for the rest, and the learning rate's course.

Muon: momentum, then the update's singular values are pushed towards one by a quintic iteration
(Jordan et al. 2024). Matrices of one shape are iterated together.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from tools.tiny.twin import Twin

_QUINTIC = (3.4445, -4.7750, 2.0315)
_ADAM_NAMES = ("router", "weights_proj", "embed_tokens", "lm_head")


class Muon:
    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95) -> None:
        self.momentum = momentum
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for p in parameters:
            self.groups[p.shape[-2], p.shape[-1]].append(p)
        self.buffers = {
            shape: torch.zeros(
                sum(p.numel() for p in group) // (shape[0] * shape[1]),
                *shape,
                device=group[0].device,
            )
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for (rows, columns), group in self.groups.items():
            buffer = self.buffers[rows, columns]
            grad = torch.cat([_gradient(p).view(-1, rows, columns) for p in group])
            buffer.lerp_(grad, 1 - self.momentum)
            update = orthogonal(grad.lerp(buffer, self.momentum))
            update *= -rate * max(1.0, rows / columns) ** 0.5
            parts = update.split([p.numel() // (rows * columns) for p in group])
            for p, part in zip(group, parts, strict=True):
                p.mul_(1 - 0.02 * rate).add_(part.view_as(p))


def _gradient(p: nn.Parameter) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """[n, a, b] -> about the nearest semi-orthogonal matrices."""
    a, b, c = _QUINTIC
    tall = x.shape[-2] > x.shape[-1]
    y: Tensor = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    y = y.transpose(-1, -2) if tall else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        g = y @ y.transpose(-1, -2)
        y = a * y + (b * g + c * g @ g) @ y
    return (y.transpose(-1, -2) if tall else y).to(x.dtype)


class Optimiser:
    """Both, with one peak rate for each."""

    def __init__(self, twin: Twin, matrix_rate: float, other_rate: float) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, p in twin.named_parameters():
            plain = p.dim() < 2 or any(word in name for word in _ADAM_NAMES)
            (others if plain else matrices).append(p)
        self.matrix_rate, self.other_rate = matrix_rate, other_rate
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            others,
            lr=other_rate,
            betas=(0.9, 0.98),
            eps=1e-10,
            weight_decay=0.0,
            fused=others[0].is_cuda,
        )

    def step(self, factor: float) -> None:
        self.muon.step(self.matrix_rate * factor)
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for parameters in self.muon.groups.values():
            for p in parameters:
                p.grad = None


def rate_factor(progress: float, step: int, warm: int = 100, hold: float = 0.5) -> float:
    """Linear warm-up over `warm` steps, constant until `hold`, then linear to 2%."""
    rise = min(1.0, (step + 1) / warm)
    fall = 1.0 if progress < hold else max(0.02, 1 - 0.98 * (progress - hold) / (1 - hold))
    return rise * fall
