"""The one linear layer: stacked, sharded, in any weight format, with its neighbours fused in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from quire import ops
from quire.errors import ConfigError, ModelError
from quire.layers.norm import RMSNorm
from quire.layers.pieces import Piece
from quire.parallel import ProcessGroup
from quire.quantization import LinearMethod, Stored
from quire.sharding import REPLICATED, ShardSpec

Activation = ops.Activation


@dataclass(frozen=True, slots=True)
class Output:
    """One of the projections stacked in a layer: q, k and v, or gate and up. `unit` is what ranks
    may not cut, a head's width for instance."""

    name: str
    size: int
    unit: int = 1


class Linear(nn.Module):
    """[T, inputs] -> [T, sum of the outputs this rank holds].

    split: "outputs" gives each rank a share of every output (column-parallel); "inputs" a share of
        the inputs, `unit` of them uncut, and the ranks' partial results are summed (row-parallel).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int | Sequence[Output],
        *,
        bias: bool,
        split: Literal["outputs", "inputs"],
        group: ProcessGroup,
        method: LinearMethod,
        device: torch.device,
        dtype: torch.dtype,
        unit: int = 1,
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = (Output("", outputs),) if isinstance(outputs, int) else tuple(outputs)
        self.group = group
        self.method = method
        self.split = split
        self.input_shard = ShardSpec(1, unit) if split == "inputs" else REPLICATED
        low, high = self.input_shard.bounds(inputs, group.rank, group.world)
        self.sizes = [self._local(output) for output in self.outputs]
        self.stored = tuple(method.stored(dtype))
        for stored in self.stored:
            shape = stored.shape(sum(self.sizes), high - low)
            tensor = torch.empty(shape, device=device, dtype=stored.dtype)
            self.register_parameter(stored.name, nn.Parameter(tensor, requires_grad=False))
        self.bias: nn.Parameter | None = None
        if bias:
            tensor = torch.empty(sum(self.sizes), device=device, dtype=dtype)
            self.bias = nn.Parameter(tensor, requires_grad=False)

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        act: Activation | None = None,
    ) -> Tensor:
        """act(norm(x) Wᵀ + bias) + residual. `residual` is [T, outputs]; `act` "silu_and_mul"
        halves the width. Kernels may fuse all of it, which is why it is one call."""
        if norm is not None and not norm.fusible:
            x, norm = norm(x), None
        scale = None if norm is None else ops.RmsScale(norm.weight, norm.eps)
        if self.split == "inputs" and self.group.world > 1:
            # What every rank holds whole may enter the sum over ranks only once.
            bias = self.bias if self.group.rank == 0 else None
            out = self.group.all_reduce(self.method.apply(x, self, bias, None, scale, None))
            if act is not None:
                raise ConfigError("an activation cannot follow a sum over ranks")
            return out if residual is None else out.add_(residual)
        return self.method.apply(x, self, self.bias, residual, scale, act)

    def pieces(self) -> Iterator[Piece]:
        start = 0
        for output, size in zip(self.outputs, self.sizes, strict=True):
            prefix = f"{output.name}." if output.name else ""
            for stored in self.stored:
                yield self._piece(prefix, output, stored, start, size)
            if self.bias is not None:
                target = self.bias.data[start : start + size]
                yield Piece(f"{prefix}bias", target, (output.size,), self._output_shard(output, 0))
            start += size

    def _piece(self, prefix: str, output: Output, stored: Stored, start: int, size: int) -> Piece:
        target = getattr(self, stored.name).data
        if stored.out_dim is not None:
            per = stored.out_per
            if (start % per or size % per) and len(self.outputs) > 1:
                raise ModelError(f"cannot stack outputs of {size} in units of {per}")
            target = target.narrow(stored.out_dim, start // per, -(-size // per))
        shard = REPLICATED
        if self.split == "outputs" and stored.out_dim is not None:
            shard = self._output_shard(output, stored.out_dim, stored.out_per)
        elif self.split == "inputs" and stored.in_dim is not None:
            shard = ShardSpec(stored.in_dim, max(1, self.input_shard.unit // stored.in_per))
        shape = stored.shape(output.size, self.inputs)
        return Piece(f"{prefix}{stored.name}", target, shape, shard)

    def _output_shard(self, output: Output, dim: int, per: int = 1) -> ShardSpec:
        if self.split == "inputs":
            return REPLICATED
        return ShardSpec(dim, max(1, output.unit // per))

    def _local(self, output: Output) -> int:
        low, high = self._output_shard(output, 0).bounds(
            output.size, self.group.rank, self.group.world
        )
        return high - low
