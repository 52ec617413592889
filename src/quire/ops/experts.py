"""The types of the ops of experts' layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from quire.ops.weight import Weight, WeightFormat

_MANY_TOKENS = 96


def expands(format: WeightFormat, assignments: int, experts: int) -> bool:
    """Whether a GPU widens the weights of all experts of a layer to 16 bits before it multiplies
    them.

    Widening in advance writes and reads 2 bytes per weight. It avoids widening 4-bit floats again
    for each tile of tokens.

    Args:
        format: format of the weights.
        assignments: number of pairs of a token and one of its experts.
        experts: number of experts of all ranks.
    """
    return format.code == "e2m1" and assignments > _MANY_TOKENS * experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Chooses a token's experts by its logits. If scores are equal, the lower index wins.

    Attributes:
        top_k: number of experts of a token.
        score: function from logits to scores.
        renormalize: whether the weights of the chosen experts are divided by their sum. With
            "softmax" the result equals a softmax over the chosen logits.
        scale: factor of the weights.
        groups: number of groups of equal size into which the experts are divided.
        top_groups: number of groups whose experts may be chosen. Groups are ranked by the sum of
            their two best scores.
    """

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True, slots=True)
class Swiglu:
    """The activation gate * sigmoid(alpha * gate + cubic * gate³) * (up + shift) (Shazeer 2020).

    Attributes:
        alpha, cubic, shift: see the formula.
        limit: upper bound of the gate and of the magnitude of up; 0 means no bounds.
    """

    alpha: float = 1.0
    limit: float = 0.0
    shift: float = 0.0
    cubic: float = 0.0


SILU = Swiglu()
"""The activation silu(gate) * up."""
_GELU = math.sqrt(8 / math.pi)
GELU_TANH = Swiglu(alpha=_GELU, cubic=0.044715 * _GELU)
"""The activation gelu(gate) * up with the approximation by tanh (Hendrycks & Gimpel 2016). It uses
1 + tanh(x) = 2 sigmoid(2 x)."""


class ExpertCopies(NamedTuple):
    """The places of experts' copies. Tokens take the copies of an expert in turn: token t takes
    copy t modulo the number of copies.

    Attributes:
        counts: int32 [experts], number of copies of each expert.
        slots: int32 [experts, most copies], each copy's index on this rank. It is -1 for a copy on
            another rank.
        loads: int32 [experts]; the number of tokens that choose an expert is added to its entry.
    """

    counts: Tensor
    slots: Tensor
    loads: Tensor


class Routed(NamedTuple):
    """Tokens and their experts.

    Attributes:
        x: [T, hidden], the inputs of the experts.
        ids: int32 [T, k], indices of experts on this rank; -1 for padding and for another rank's
            experts.
        weights: float32 [T, k].
    """

    x: Tensor
    ids: Tensor
    weights: Tensor


class ExpertWeights(NamedTuple):
    """One projection of several experts. The outputs of one expert follow those of the one before.

    Attributes:
        weight: [experts * outputs, inputs].
        bias: [experts, outputs], or None.
        experts: number of experts of this rank.
        all_ranks: number of experts of all ranks, copies included; 0 if this rank has all of them.
    """

    weight: Weight
    experts: int
    bias: Tensor | None = None
    all_ranks: int = 0

    @property
    def total(self) -> int:
        """Returns the number of experts over which the tokens are spread."""
        return self.all_ranks or self.experts

    @property
    def outputs(self) -> int:
        """Returns the number of outputs of one expert."""
        return self.weight.outputs // self.experts

    def expert(self, expert: int) -> Weight:
        """Returns the weight of one expert, a view."""
        return self.weight.rows(expert * self.outputs, (expert + 1) * self.outputs)
