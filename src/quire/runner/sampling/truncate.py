"""Keeping only the likely tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def min_p(logits: Tensor, threshold: Tensor) -> Tensor:
    """Drops tokens less likely than `threshold` [N] times the likeliest (Nguyen et al., 2024).
    logits: [N, V], after temperature; returns it with -inf for what is dropped."""
    floor = logits.amax(dim=-1, keepdim=True) + threshold.unsqueeze(1).log()
    return logits.masked_fill(logits < floor, -torch.inf)


def top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the `top_k` [N] (0: all) likeliest tokens, ties included, and of those the fewest whose
    probabilities reach `top_p` [N] (nucleus sampling, Holtzman et al., 2019)."""
    vocab = logits.shape[-1]
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    last = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long() - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last.unsqueeze(1)), -torch.inf)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    drop = (before >= top_p.unsqueeze(1)) & (top_p < 1.0).unsqueeze(1)
    drop[:, 0] = False
    ordered = ordered.masked_fill(drop, -torch.inf)
    return torch.empty_like(logits).scatter_(1, index, ordered)
