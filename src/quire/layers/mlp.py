"""Feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.layers.linear import Activation, Linear, Output
from quire.layers.norm import RMSNorm
from quire.parallel import ProcessGroup
from quire.quantization import LinearMethod


class Mlp(nn.Module):
    """down(act(up(x))); with the activation "silu_and_mul", up is gate and up stacked."""

    def __init__(
        self,
        hidden: int,
        width: int,
        *,
        act: Activation,
        bias: bool,
        group: ProcessGroup,
        method: LinearMethod,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.act: Activation = act
        names = ("gate", "up") if act == "silu_and_mul" else ("up",)
        self.up = Linear(
            hidden,
            [Output(name, width) for name in names],
            bias=bias,
            split="outputs",
            group=group,
            method=method,
            device=device,
            dtype=dtype,
        )
        self.down = Linear(
            width,
            hidden,
            bias=bias,
            split="inputs",
            group=group,
            method=method,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x + mlp(norm(x)), [T, hidden] -> [T, hidden]."""
        return self.down(  # type: ignore[no-any-return]
            self.up(x, norm=norm, act=self.act), residual=x
        )
