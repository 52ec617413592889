"""The residual stream as a value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.layers.norm import RMSNorm
from quire.parallel import ProcessGroup


@dataclass(slots=True)
class Residual:
    """The residual stream [T, width].

    apart: layers give only what they would add to the stream.
    """

    hidden: Tensor
    apart: bool = False

    def total(self) -> Tensor:
        """Returns the stream as one tensor."""
        return self.hidden

    def inputs(self, norm: RMSNorm | None) -> tuple[Tensor, RMSNorm | None]:
        """Returns what a layer that norms the stream first takes, and the norm that it has yet to
        apply."""
        return self.total(), norm


# A residual stream whose last sum over ranks waits for the norm behind it.


@dataclass(slots=True)
class LaterSum(Residual):
    """The stream `hidden`, and what is yet to be added to it.

    sum: this rank's part, the group of those that all have one, and what an error calls the sum;
        None once it is done. All ranks ask for it at the same place.
    """

    sum: tuple[Tensor, ProcessGroup, str] | None = None

    def total(self) -> Tensor:
        if self.sum is not None:
            part, group, name = self.sum
            self.hidden, self.sum = group.all_reduce(part, self.hidden, name), None
        return self.hidden

    def inputs(self, norm: RMSNorm | None) -> tuple[Tensor, RMSNorm | None]:
        scale = None if norm is None else norm.scale
        if self.sum is not None and scale is not None:
            part, group, name = self.sum
            sum_normed = group.sum_normed
            both = sum_normed and sum_normed(part, self.hidden, *scale, name)
            if both is not None:
                self.hidden, self.sum = both[0], None
                return both[1], None
        return self.total(), norm
