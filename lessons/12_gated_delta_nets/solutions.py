"""Solutions of the exercises on recurrent states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def short_convolution(x: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    inputs, taps = torch.cat([before, x]), weight.shape[1]
    windows = inputs.unfold(0, taps, 1)  # [tokens, channels, taps]
    return (windows * weight).sum(-1), inputs[len(inputs) - taps + 1 :]


def longest_resumable(checkpoints: Sequence[int], kv_tokens: int, prompt: int) -> int:
    most = min(kv_tokens, prompt - 1)
    return max((length for length in checkpoints if length <= most), default=0)


def break_even(state_bytes: int, token_bytes: int) -> int:
    return state_bytes // token_bytes + 1
