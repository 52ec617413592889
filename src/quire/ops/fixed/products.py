"""Products of matrices in which the order of every sum is the same for all shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
"""Rows of every product. BLAS uses other kernels for fewer rows, and splits more rows by its own
rules. With this number, results depend neither on a row's place nor on the number of outputs
(`tests/ops/test_fixed.py`)."""
INPUTS = 256
"""Most inputs of a product, because BLAS libraries split more. The sums of further inputs are added
in order."""


def products(x: Tensor, weight: Tensor, inputs: int = INPUTS) -> Tensor:
    """Returns x [T, K] @ weight [N, K]ᵀ, [T, N], of one dtype, float32 or float64.

    Args:
        inputs: number of inputs that one product sums, at most `INPUTS`.
    """
    tokens, outputs = len(x), len(weight)
    x = F.pad(x, (0, 0, 0, -tokens % ROWS))
    if outputs < ROWS:
        weight = F.pad(weight, (0, 0, 0, ROWS - outputs))
    out = x.new_zeros(len(x), len(weight))
    for row in range(0, len(x), ROWS):
        own, total = x[row : row + ROWS], out[row : row + ROWS]
        for first in range(0, x.shape[1], inputs):
            part = slice(first, first + inputs)
            total += F.linear(own[:, part], weight[:, part])
    return out[:tokens, :outputs]


def wider(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which numbers of a dtype are summed."""
    return torch.promote_types(dtype, torch.float32)
