"""Feed-forward layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from quire.layers.batch import ForwardBatch
from quire.layers.build import Build
from quire.layers.linear import Activation, Linear, Output
from quire.layers.norm import RMSNorm
from quire.layers.residual import Residual


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """A dense feed-forward layer.

    Attributes:
        width: hidden units of the whole layer.
        act: activation; a gated one needs a gate projection too.
        bias: whether the projections have biases.
    """

    width: int
    act: Activation
    bias: bool

    def layer(self, hidden: int, build: Build) -> Mlp:
        """Returns the layer, for hidden states of this width."""
        return Mlp(self, hidden, build)


class Mlp(nn.Module):
    """down(act(up(x))). With a gated activation `up` stacks the gate and up projections."""

    def __init__(self, spec: MlpSpec, hidden: int, build: Build) -> None:
        super().__init__()
        self.act: Activation = spec.act
        names = ("gate", "up") if spec.act.endswith("_and_mul") else ("up",)
        outputs = [Output(name, spec.width) for name in names]
        self.up = Linear(hidden, outputs, build.within("up"), bias=spec.bias, split="outputs")
        self.down = Linear(spec.width, hidden, build.within("down"), bias=spec.bias, split="inputs")

    def forward(self, x: Residual, norm: RMSNorm | None, batch: ForwardBatch) -> Residual:
        """Returns x + mlp(norm(x)), [T, hidden]."""
        hidden, norm = x.layer_input(norm)
        return self.down.add(self.up(hidden, norm=norm, act=self.act), x)

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that `forward` needs for intermediates."""
        # The activation may run as its own kernel, with an input and an output.
        return 2 * self.up.workspace_bytes(tokens) + self.down.workspace_bytes(tokens)
