"""The residual stream, and the all-reduce that waits for the next norm.

A row-parallel layer ends with an all-reduce, and the next layer begins with an RMSNorm. Some groups
of ranks do both in one kernel (`ProcessGroup.all_reduce_norm`). So the layer may return a
`DeferredAllReduce`, and the next layer's `layer_input` decides how to end it:

    this rank's partial sum --+
                              +-- all-reduce, + residual --+-- norm --> input of the next layer
    residual -----------------+                            |
                                                           +----------> residual of the next layer
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.layers.norm import RMSNorm
from quire.parallel import ProcessGroup


@dataclass(slots=True)
class Residual:
    """The residual stream.

    Attributes:
        hidden: [T, width], in the model's dtype.
        delta_only: a layer that gets this stream returns its own output without adding the stream.
            Blocks that norm or scale a layer's output set it.
    """

    hidden: Tensor
    delta_only: bool = False

    def total(self) -> Tensor:
        """Returns the stream [T, width] with every all-reduce done."""
        return self.hidden

    def layer_input(self, norm: RMSNorm | None) -> tuple[Tensor, RMSNorm | None]:
        """Returns a layer's input and the norm that the layer must still apply to it.

        Args:
            norm: the norm that stands before the layer, or None.
        """
        return self.total(), norm


@dataclass(slots=True)
class PartialSum:
    """One rank's term of a sum over ranks.

    Attributes:
        partial: [T, width], this rank's term.
        group: the ranks that hold the other terms.
        name: the layer, for error messages.
    """

    partial: Tensor
    group: ProcessGroup
    name: str


@dataclass(slots=True)
class DeferredAllReduce(Residual):
    """A stream to which a sum over ranks must still be added.

    All ranks must ask for `total` or `layer_input` at the same place in the model, because either
    one starts the collective.

    Attributes:
        hidden: [T, width], the stream without the pending sum.
        pending: the sum, or None once it has been added.
    """

    pending: PartialSum | None = None

    def total(self) -> Tensor:
        """Returns the stream [T, width], after an all-reduce if one is pending."""
        if self.pending is not None:
            term = self.pending
            self.hidden = term.group.all_reduce(term.partial, self.hidden, term.name)
            self.pending = None
        return self.hidden

    def layer_input(self, norm: RMSNorm | None) -> tuple[Tensor, RMSNorm | None]:
        """See `Residual.layer_input`. If the group fuses all-reduce and norm, the input is already
        normed, and no norm is left to apply."""
        scale = None if norm is None else norm.scale
        if self.pending is not None and scale is not None:
            term = self.pending
            fused = term.group.all_reduce_norm
            both = fused and fused(term.partial, self.hidden, *scale, term.name)
            if both is not None:
                self.hidden, self.pending = both[0], None
                return both[1], None
        return self.total(), norm
