"""The residual stream as a value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream [T, width], of which some addends may still be apart.

    hidden: what has been added up. pending: partial sums of the ranks, each [T, width], to be added
    in this order, so that every rank gets the same bits. apart: layers give only what they
    would add to the stream.
    """

    hidden: Tensor
    pending: tuple[Tensor, ...] = ()
    apart: bool = False

    def total(self) -> Tensor:
        """Returns the stream as one tensor. Where something is pending it is a new one: other
        kernels may still read `hidden`."""
        if not self.pending:
            return self.hidden
        total = self.hidden + self.pending[0]
        for part in self.pending[1:]:
            total += part
        return total
