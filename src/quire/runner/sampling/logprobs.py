"""Log-probabilities of given tokens and of their likeliest alternatives."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits: float32 [N, V], as the model gave them. tokens: [N].

    Returns ids int32 and values float32 [N, 1 + width] (the token itself, then the likeliest), and
    ranks int32 [N], 1 for the likeliest.
    """
    values = logits.log_softmax(dim=-1)
    own = values.gather(1, tokens.long().unsqueeze(1))
    ranks = (values > own).sum(dim=-1, dtype=torch.int32) + 1
    best, ids = values.topk(min(width, values.shape[1]), dim=-1)
    return (
        torch.cat([tokens.int().unsqueeze(1), ids.int()], dim=1),
        torch.cat([own, best], dim=1),
        ranks,
    )
