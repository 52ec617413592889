"""The value that says how the layers of a model are built."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.parallel import ProcessGroup
from quire.quantization import Quantization


@dataclass(frozen=True, slots=True)
class Build:
    """Says where a model's layers are and how they store what they hold.

    group: the ranks that share the layers. quantization: decides each linear layer's weight format.
    dtype: of activations, and of parameters without a format. name: of the module to build.
    expert_parallel: ranks hold whole experts instead of a share of each. drafts: the most draft
    tokens of a row, which no state may be lost to.
    """

    group: ProcessGroup
    quantization: Quantization
    device: torch.device
    dtype: torch.dtype
    name: str = ""
    expert_parallel: bool = False
    drafts: int = 0

    def within(self, name: str) -> Build:
        """Returns the value for the module's part `name`."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """Returns a parameter without content."""
        tensor = torch.empty(shape, device=self.device, dtype=self.dtype)
        return torch.nn.Parameter(tensor, requires_grad=False)
