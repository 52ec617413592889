"""The residual stream as a value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.layers.norm import RMSNorm


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
