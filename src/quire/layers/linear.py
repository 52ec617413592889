"""The one linear layer: stacked, sharded, in any weight format, with its neighbours fused in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from quire import ops
from quire.errors import ConfigError
from quire.layers.build import Build
from quire.layers.norm import RMSNorm
from quire.layers.parameter_slice import ParameterSlice
from quire.layers.residual import Residual
from quire.quantization import Range, StoredTensor
from quire.sharding import REPLICATED, ShardSpec

Activation = ops.Activation


@dataclass(frozen=True, slots=True)
class Output:
    """One of the projections stacked in a layer: q, k and v, or gate and up.

    unit: outputs that ranks may not cut, a head's width for instance. padded: the size need not
    divide evenly; ranks hold equally many rows, and behind the last output they are zero.
    """

    name: str
    size: int
    unit: int = 1
    padded: bool = False


class Linear(nn.Module):
    """[T, inputs] -> [T, sum of the outputs this rank holds].

    split: "outputs" gives each rank a share of every output (column-parallel); "inputs" a share of
        the inputs, `unit` of them uncut, and the ranks' partial results are summed (row-parallel).
    tied: the whole layer's weights as they are, those of another module, instead of its own.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int | Sequence[Output],
        build: Build,
        *,
        bias: bool,
        split: Literal["outputs", "inputs"],
        unit: int = 1,
        tied: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.name = build.name
        self.group = build.group
        self.quantization = build.quantization
        self.inputs = inputs
        self.outputs = (Output("", outputs),) if isinstance(outputs, int) else tuple(outputs)
        self.split = split
        self.tied = tied is not None
        shard = ShardSpec(1, unit) if split == "inputs" else REPLICATED
        self.columns: Range = shard.bounds(inputs, self.group.rank, self.group.world)
        self.sizes = [self._size(output) for output in self.outputs]
        low, high = self.columns
        if tied is None:
            format = self.quantization.format_for(build.name, build.dtype)
            self.weight = ops.Weight.empty(
                format, sum(self.sizes), high - low, build.device, before=low
            )
        else:
            self.weight = ops.Weight.plain(tied)
        if any(output.padded for output in self.outputs) and tied is None:
            self.weight.clear()
        for name in ("values", "scales", "zeros"):
            tensor = getattr(self.weight, name)
            if tensor is not None:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias = build.empty(sum(self.sizes)) if bias else None

    def forward(
        self, x: Tensor, norm: RMSNorm | None = None, act: Activation | None = None
    ) -> Tensor:
        """Returns act(norm(x) Wᵀ + bias), over all ranks. `act` "silu_and_mul" halves the width.

        Raises:
            ConfigError: a norm or an activation of a row-parallel layer: a norm would see a share
                of the inputs only, an activation a share of the sum.
        """
        return self._compute(x, None, norm, act)

    def add(self, x: Tensor, residual: Residual) -> Residual:
        """Returns residual + x Wᵀ + bias."""
        return Residual(self._compute(x, residual.total(), None, None))

    def _compute(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: RMSNorm | None,
        act: Activation | None,
    ) -> Tensor:
        if self.split == "inputs":
            if norm is not None or act is not None:
                raise ConfigError(
                    f"{self.name}: a linear layer whose inputs are split over ranks takes no "
                    f"{'norm' if norm is not None else 'activation'}"
                )
            if self.group.world > 1:
                # What every rank holds whole may enter the sum over ranks only once.
                bias = self.bias if self.group.rank == 0 else None
                out = self.group.all_reduce(ops.linear(x, self.weight, bias))
                return out if residual is None else out.add_(residual)
        scale = None
        if norm is not None:
            scale = norm.scale
            if scale is None:
                x = norm(x)
        return ops.linear(x, self.weight, self.bias, residual, scale, act)

    def slices(self) -> Iterator[ParameterSlice]:
        """Yields the checkpoint's tensors of each stacked output: those of the weight, then the
        bias. A tied layer has none."""
        start = 0
        for output, size in zip(self.outputs, self.sizes, strict=True):
            prefix = f"{output.name}." if output.name else ""
            rows = self._rows(output)
            weight = self.weight.rows(start, start + size)
            for stored in () if self.tied else self.quantization.stored(self.weight.format):
                yield self._slice(prefix, output.size, rows, weight, stored)
            if self.bias is not None:
                target = self.bias.data[start : start + size]
                yield ParameterSlice.of(f"{prefix}bias", target, (output.size,), (rows,))
            start += size

    def _slice(
        self, prefix: str, size: int, rows: Range, weight: ops.Weight, stored: StoredTensor
    ) -> ParameterSlice:
        columns = self.columns

        def write(part: Tensor, start: int) -> None:
            stored.write(weight, part, start, rows, columns)

        shape, ranges = stored.shape(size, self.inputs), stored.ranges(rows, columns, self.inputs)
        name = f"{prefix}{stored.name}"
        return ParameterSlice(name, shape, ranges, write, weight.values.device, stored.dtypes)

    def finish(self) -> None:
        """Ends loading.

        Raises:
            ModelError: the loaded weights make no sense.
        """
        if not self.tied:
            self.quantization.finish(self.name, self.weight)

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the memory that the result takes, and the weight, where it is
        dequantized as a whole."""
        weight = self.weight
        if weight.scales is None:
            return tokens * weight.outputs * weight.dtype.itemsize
        # In fp32 at most; groups take two intermediates as large.
        copies = 3 if weight.format.group else 1
        return 4 * (tokens * weight.outputs + copies * weight.outputs * weight.inputs)

    def _rows(self, output: Output) -> Range:
        """Returns the outputs of the whole projection that this rank holds."""
        if self.split == "inputs":
            return 0, output.size
        shard = ShardSpec(0, output.unit, output.padded)
        return shard.bounds(output.size, self.group.rank, self.group.world)

    def _size(self, output: Output) -> int:
        if output.padded and self.split == "outputs":
            return -(-output.size // self.group.world)
        low, high = self._rows(output)
        return high - low
