"""The settings with which all layers of a model are built."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.parallel import ProcessGroup
from quire.quantization import Quantization


@dataclass(frozen=True, slots=True)
class Build:
    """Device, dtype, ranks and quantization of a module to build.

    Attributes:
        group: the ranks that share the layers.
        quantization: chooses each linear layer's weight format.
        device: holds the parameters; "meta" allocates nothing.
        dtype: dtype of activations, and of parameters that have no weight format.
        name: dotted name of the module, such as `layers.0.mlp`.
        expert_parallel: each rank holds whole experts instead of a part of every expert.
        drafts: most draft tokens of a row in a step. Drafts may be rejected, so recurrent layers
            must be able to return to the state after any of them.
    """

    group: ProcessGroup
    quantization: Quantization
    device: torch.device
    dtype: torch.dtype
    name: str = ""
    expert_parallel: bool = False
    drafts: int = 0

    def within(self, name: str) -> Build:
        """Returns the settings for the submodule `name`."""
        return replace(self, name=f"{self.name}.{name}" if self.name else name)

    def empty(self, *shape: int) -> torch.nn.Parameter:
        """Returns an uninitialized parameter in `dtype`."""
        tensor = torch.empty(shape, device=self.device, dtype=self.dtype)
        return torch.nn.Parameter(tensor, requires_grad=False)
