"""The types of the ops of experts' layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from quire.ops.weight import Weight, WeightFormat

_MANY_TOKENS = 96


def expands(format: WeightFormat, assignments: int, experts: int) -> bool:
    """Whether a GPU makes 16-bit numbers of all experts of a layer before it multiplies them.

    That writes and reads 2 bytes a weight, and saves widening 4-bit floats for each tile of tokens.
    assignments: of tokens to any of the experts. experts: of all ranks.
    """
    return format.code == "e2m1" and assignments > _MANY_TOKENS * experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Says how a token's experts follow from its logits. Equal scores: the lower index first.

    top_k: experts of a token. score: of an expert, from the logits.
    renormalize: the weights of the chosen experts are divided by their sum. With "softmax" that is
        the same as a softmax over the chosen logits alone.
    scale: factor of the weights.
    groups, top_groups: experts are in so many groups of equal size, of which so many, those with
        the largest sum of the best two scores, may be chosen from.
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

    limit: the gate is cut above it, up beyond plus and minus it; 0: neither.
    """

    alpha: float = 1.0
    limit: float = 0.0
    shift: float = 0.0
    cubic: float = 0.0


SILU = Swiglu()
"""The activation silu(gate) * up."""
_GELU = math.sqrt(8 / math.pi)
GELU_TANH = Swiglu(alpha=_GELU, cubic=0.044715 * _GELU)
"""The activation gelu(gate) * up with the approximation by tanh, 1 + tanh(x) being 2 sigmoid(2 x)
(Hendrycks & Gimpel 2016)."""


class ExpertCopies(NamedTuple):
    """The places of experts' copies, over which their tokens are shared out by turns: the copy of
    token t is the one numbered t modulo their count.

    counts: int32 [experts], copies of each. slots: int32 [experts, most copies], this rank's number
    of each copy, -1 of another rank's. loads: int32 [experts], to which the tokens are added that
    choose each.
    """

    counts: Tensor
    slots: Tensor
    loads: Tensor


class Routed(NamedTuple):
    """Tokens and their experts.

    x: [T, hidden], what the experts compute on. ids: int32 [T, k], this rank's numbers of experts;
    -1 for none, where a token is padding or the expert is another rank's.
    weights: float32 [T, k].
    """

    x: Tensor
    ids: Tensor
    weights: Tensor


class ExpertWeights(NamedTuple):
    """One projection of `experts` experts, whose outputs lie one expert behind the other.

    bias: [experts, outputs of one], or None. all_ranks: experts of all ranks, copies included; 0
        if these are all.
    """

    weight: Weight
    experts: int
    bias: Tensor | None = None
    all_ranks: int = 0

    @property
    def total(self) -> int:
        """Returns the experts over which the tokens are spread."""
        return self.all_ranks or self.experts

    @property
    def outputs(self) -> int:
        """Returns the outputs of one expert."""
        return self.weight.outputs // self.experts

    def of(self, expert: int) -> Weight:
        """Returns the weight of one expert, a view."""
        return self.weight.rows(expert * self.outputs, (expert + 1) * self.outputs)
