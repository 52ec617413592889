"""The types of ops' arguments that are neither tensors nor numbers."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from torch import Tensor

Activation = Literal["silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul", "gelu", "gelu_tanh"]
"""Functions that a linear layer may apply to its outputs, see `ops.activate`. Names of gated
functions end in "_and_mul"; they halve the number of outputs. "gelu" is exact, "gelu_tanh" its
approximation by tanh."""


class RmsScale(NamedTuple):
    """The weight [width] and the epsilon of an RMSNorm."""

    weight: Tensor
    eps: float


Scratch = dict[Any, Any]
"""Caches data that an implementation derives from a step's metadata (gather indices, masks) for the
step's further layers. A scratch must not outlive the tensors that its content was derived from.
Only the dict under the key "workspace", which holds reusable memory, may serve all steps of a
stream."""
