"""Attention sinks: a score per head that takes its share of the weights and has no value."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax(scores: Tensor, sinks: Tensor) -> Tensor:
    """Returns exp(scores) / (exp(sink) + the sum of exp(scores)) over the last axis (Xiao et al.
    2023; learned, as in gpt-oss).

    scores: [P, Hkv, M, context], M being the query heads of a KV head, each with as many queries.
    sinks: [Hq].
    """
    own = sinks.to(scores.dtype).view(1, scores.shape[1], -1)
    own = own.repeat_interleave(scores.shape[2] // own.shape[2], 2)
    own = own.unsqueeze(3).expand(len(scores), -1, -1, -1)
    return torch.cat((scores, own), 3).softmax(3)[..., :-1]
