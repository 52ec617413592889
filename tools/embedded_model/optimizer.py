"""Muon for the matrices, AdamW for embeddings and norms, in one object.

Muon (Jordan et al. 2024): momentum, then the nearest orthogonal matrix by five Newton-Schulz
steps, scaled by 0.2 * sqrt(larger side) so that AdamW's learning rates fit (Liu et al. 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def orthogonal(g: Tensor) -> Tensor:
    """Newton-Schulz on a stack of matrices [count, rows, columns], in bf16."""
    x = g.bfloat16()
    if g.shape[-2] > g.shape[-1]:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if g.shape[-2] > g.shape[-1] else x


class Optimizer:
    """Updates `model`'s float32 parameters; matrices of one shape go through Muon as one stack."""

    def __init__(self, model: nn.Module, lr: float, decay: float, fused: bool) -> None:
        self.lr, self.decay = lr, decay
        self.stacks: dict[tuple[int, ...], list[nn.Parameter]] = {}
        others = []
        for name, p in model.named_parameters():
            if p.dim() == 2 and "embed" not in name:
                self.stacks.setdefault(tuple(p.shape), []).append(p)
            else:
                others.append(p)
        self.momentum = {
            shape: torch.zeros(len(ps), *shape, device=ps[0].device)
            for shape, ps in self.stacks.items()
        }
        groups = [
            {"params": [p for p in others if p.dim() == 2], "weight_decay": decay},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at `scale` times the peak learning rate; gradients are cleared."""
        lr = self.lr * scale
        for shape, parameters in self.stacks.items():
            gradient = torch.stack([p.grad for p in parameters])
            momentum = self.momentum[shape].lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95)).float()
            torch._foreach_mul_(parameters, 1 - lr * self.decay)
            torch._foreach_add_(
                parameters, list(update.unbind()), alpha=-lr * 0.2 * max(shape) ** 0.5
            )
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        for parameters in (*self.stacks.values(), *(g["params"] for g in self.adam.param_groups)):
            for p in parameters:
                p.grad = None
