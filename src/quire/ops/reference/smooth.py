"""Functions that are rounded alike wherever a number stands in its tensor.

PyTorch's own, but for exp, log1p, erf and tanh, compute what is left behind the last whole vector
otherwise than the rest, so that a number's last bit depends on the tensor's size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Returns 1 / (1 + exp(-x))."""
    return x.neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """Returns x sigmoid(x)."""
    return x / x.neg().exp_().add_(1)


def softplus(x: Tensor) -> Tensor:
    """Returns log(1 + exp(x))."""
    return x.clamp(min=0) + x.abs().neg_().exp_().log1p_()


def gelu(x: Tensor) -> Tensor:
    """Returns x Φ(x), Φ being the normal distribution function (Hendrycks & Gimpel 2016)."""
    return (x * math.sqrt(0.5)).erf_().add_(1) * (x * 0.5)


def gelu_tanh(x: Tensor) -> Tensor:
    """Returns the approximation of `gelu` by tanh."""
    inner = (x * x * x).mul_(0.044715).add_(x).mul_(math.sqrt(2 / math.pi))
    return torch.tanh(inner).add_(1) * (x * 0.5)
