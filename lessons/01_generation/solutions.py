"""Solutions of the exercises on sampling and scoring."""

from __future__ import annotations

import torch
from torch import Tensor


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keeps the fewest tokens, likeliest first, that together have the probability p or more."""
    values, ids = logits.softmax(-1).sort(descending=True)
    # A token is kept if those before it do not suffice; the likeliest always is.
    kept = ids[values.cumsum(0) - values < p]
    out = torch.full_like(logits, -torch.inf)
    out[kept] = logits[kept]
    return out


def penalize(logits: Tensor, ids: list[int], penalty: float) -> Tensor:
    """Makes tokens that the text has less likely, each once, however often they stand there."""
    seen = torch.tensor(sorted(set(ids)), dtype=torch.long)
    out, own = logits.clone(), logits[seen]
    out[seen] = torch.where(own > 0, own / penalty, own * penalty)
    return out


def perplexity(logits: Tensor, ids: Tensor) -> float:
    """Returns exp of the mean of -log p(token), over all tokens but the first."""
    picked = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])
    return float((-picked.mean()).exp())
