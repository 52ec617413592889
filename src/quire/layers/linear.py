"""The linear layer: stacked outputs, sharded over ranks, in any weight format.

The layer takes the preceding norm and the following activation or residual, so that a kernel may
fuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from quire import ops
from quire.errors import ConfigError
from quire.layers.build import Build
from quire.layers.fixed_sums import row_parallel
from quire.layers.norm import RMSNorm
from quire.layers.parameter_slice import ParameterSlice
from quire.layers.residual import DeferredAllReduce, PartialSum, Residual
from quire.layers.split_groups import round_split_groups
from quire.parallel.sharding import REPLICATED, ShardSpec
from quire.quantization import CheckpointTensor, ProjectionShare, Range, Scheme

Activation = ops.Activation


@dataclass(frozen=True, slots=True)
class Output:
    """One of the projections stacked in a layer, such as q, k or v.

    Attributes:
        name: below the layer's name, "" for a layer of one projection.
        size: outputs of the whole projection.
        unit: outputs that stay on one rank, such as a head's width.
        padded: `size` need not divide evenly. All ranks hold equally many rows, and the rows after
            the last output are zero.
    """

    name: str
    size: int
    unit: int = 1
    padded: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """Neighbouring outputs of a layer that share a weight.

    Attributes:
        first: index of the first output.
        end: index after the last output.
        weight: this rank's part.
        scheme: the weight's format and checkpoint tensors, or None if another module owns it.
    """

    first: int
    end: int
    weight: ops.Weight
    scheme: Scheme | None


class Linear(nn.Module):
    """Maps [T, inputs] to [T, outputs of this rank].

    Neighbouring outputs share a weight if their schemes are equal and allow it.

    Args:
        inputs: inputs of the whole layer.
        outputs: the stacked projections, or the size of a single one.
        build: see `Build`.
        bias: whether the layer has a bias.
        split: "outputs" gives each rank a share of every output (column-parallel). "inputs" gives
            each rank a share of the inputs, and an all-reduce adds the results (row-parallel).
        unit: inputs that stay on one rank in a row-parallel layer.
        tied: another module's weight, which this layer uses too, or None.

    Attributes:
        adapter: takes the arguments of `forward` in a step with LoRA adapters, and computes the
            layer with them. It returns None in steps without adapters.
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
        self.inputs = inputs
        self.outputs = (Output("", outputs),) if isinstance(outputs, int) else tuple(outputs)
        self.split = split
        self.tied = tied is not None
        shard = ShardSpec(1, unit) if split == "inputs" else REPLICATED
        self.columns: Range = shard.bounds(
            inputs, self.group.rank, self.group.world, f"{build.name}, inputs"
        )
        self.sizes = [self._output_size(output) for output in self.outputs]
        if tied is None:
            self.stacks = tuple(self._stacks(build))
        else:
            weight = ops.Weight.plain(tied)
            self.stacks = (Stack(0, len(self.outputs), weight, None),)
        # Tied weights are the other module's parameters.
        for index, stack in enumerate(() if self.tied else self.stacks):
            behind = f"_{index}" if index else ""
            for name in ("values", "scales", "zeros", "groups", "input_scale"):
                tensor = getattr(stack.weight, name)
                if tensor is not None:
                    parameter = nn.Parameter(tensor, requires_grad=False)
                    self.register_parameter(name + behind, parameter)
        self.bias = build.empty(sum(self.sizes)) if bias else None
        self.adapter: Callable[..., Tensor | None] | None = None

    def _stacks(self, build: Build) -> Iterator[Stack]:
        """Yields the layer's stacks with uninitialized weights."""
        schemes = [
            build.quantization.scheme_for(_dotted(build.name, output.name), build.dtype)
            for output in self.outputs
        ]
        low, high = self.columns
        first = 0
        while first < len(schemes):
            scheme, end = schemes[first], first + 1
            while scheme.stacks and end < len(schemes) and schemes[end] == scheme:
                end += 1
            if (high - low) % scheme.format.packed:
                raise ConfigError(
                    f"{build.name}: {high - low} inputs of a rank cannot be stored "
                    f"{scheme.format.packed} to a byte",
                    "tensor_parallel_size",
                )
            weight = ops.Weight.empty(
                scheme.format, sum(self.sizes[first:end]), high - low, build.device,
                before=low, whole=self.inputs, stacked=end - first,
            )  # fmt: skip
            if any(output.padded for output in self.outputs[first:end]):
                weight.clear()
            yield Stack(first, end, weight, scheme)
            first = end

    @property
    def weights(self) -> tuple[ops.Weight, ...]:
        """Returns the weight of each stack, in the order of outputs."""
        return tuple(stack.weight for stack in self.stacks)

    @property
    def weight(self) -> ops.Weight:
        """Returns the weight that all outputs share.

        Raises:
            ConfigError: the layer has several weights.
        """
        if len(self.stacks) > 1:
            raise ConfigError(f"{self.name} has {len(self.stacks)} weights instead of one")
        return self.stacks[0].weight

    def forward(
        self,
        x: Tensor,
        norm: RMSNorm | None = None,
        act: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Returns act(norm(x) Wᵀ + bias) or residual + x Wᵀ + bias, summed over ranks if the layer
        is row-parallel.

        Args:
            x: [T, this rank's inputs].
            norm: applied to x, or None.
            act: activation applied to the result, or None. A gated activation halves the width.
            residual: [T, outputs], added to the result, or None.

        Raises:
            ConfigError: a row-parallel layer gets a norm or an activation. A rank sees only a part
                of the inputs, and only a term of the sum.
        """
        if self.split == "inputs" and (norm is not None or act is not None):
            raise ConfigError(
                f"{self.name}: a linear layer whose inputs are split over ranks takes no "
                f"{'norm' if norm is not None else 'activation'}"
            )
        if self.adapter is not None:
            if (adapted := self.adapter(x, residual, norm, act)) is not None:
                return adapted
        elif self.split == "inputs" and ops.current_policy().deterministic:
            return row_parallel(x, self.weight, self.bias, residual, self.inputs, self.group)
        if self.split == "inputs" and self.group.world > 1:
            return self.group.all_reduce(self.partial_sum(x), residual, self.name)
        if len(self.stacks) > 1:
            return self._each_stack(x, residual, norm, act)
        scale = None if norm is None else norm.scale
        if norm is not None and scale is None:
            x = norm(x)
        return ops.linear(x, self.weight, self.bias, residual, scale, act)

    def add(self, x: Tensor, residual: Residual) -> Residual:
        """Returns residual + x Wᵀ + bias, or x Wᵀ + bias alone if the residual is `delta_only`."""
        if residual.delta_only:
            return Residual(self(x))
        row_parallel = self.split == "inputs" and self.adapter is None
        if row_parallel and self.group.all_reduce_norm is not None:
            stream = residual.total()
            return DeferredAllReduce(
                stream, pending=PartialSum(self.partial_sum(x), self.group, self.name)
            )
        return Residual(self(x, residual=residual.total()))

    def partial_sum(self, x: Tensor) -> Tensor:
        """Returns this rank's term [T, outputs] of the sum over ranks of a row-parallel layer."""
        weight = self.weight
        if weight.format.inputs == "group" and weight.inputs % weight.format.group:
            x, weight = round_split_groups(x, weight, self.group)
        # Every rank holds the whole bias, but the sum over ranks must contain it only once.
        return ops.linear(x, weight, self.bias if self.group.rank == 0 else None)

    def _each_stack(
        self, x: Tensor, residual: Tensor | None, norm: RMSNorm | None, act: Activation | None
    ) -> Tensor:
        """Computes the stacks one after the other, and concatenates their outputs."""
        if norm is not None:
            x = norm(x)
        sizes = [weight.outputs for weight in self.weights]
        biases = [None] * len(sizes) if self.bias is None else torch.split(self.bias, sizes)
        out = torch.cat([ops.linear(x, *own) for own in zip(self.weights, biases, strict=True)], 1)
        if act is not None:
            out = ops.activate(out, act)
        return out if residual is None else out.add_(residual)

    def slices(self) -> Iterator[ParameterSlice]:
        """Yields the checkpoint's tensors of each output: the weight's, then the bias. A tied layer
        has only the bias."""
        start = 0
        for stack in self.stacks:
            row = 0
            for index in range(stack.first, stack.end):
                output, size = self.outputs[index], self.sizes[index]
                rows = self._output_range(output)
                weight = stack.weight.rows(row, row + size, index - stack.first)
                for stored in () if stack.scheme is None else stack.scheme.stored:
                    if stored.name != "bias" or self.bias is None:
                        yield self._slice(output, rows, weight, stored)
                if self.bias is not None:
                    target = self.bias.data[start : start + size]
                    name = _dotted(output.name, "bias")
                    yield ParameterSlice.for_tensor(name, target, (output.size,), (rows,))
                start += size
                row += size

    def _slice(
        self, output: Output, rows: Range, weight: ops.Weight, stored: CheckpointTensor
    ) -> ParameterSlice:
        share = ProjectionShare(rows, self.columns, output.size, self.inputs)

        def write(part: Tensor, start: int) -> None:
            stored.write(weight, part, start, share)

        shape, ranges = stored.shape(output.size, self.inputs), stored.ranges(share)
        name = _dotted(output.name, stored.name)
        return ParameterSlice(name, shape, ranges, write, weight.values.device, stored.dtypes)

    @property
    def updates_whole(self) -> bool:
        """Whether an update of the weights must bring all of the layer's tensors. Projections may
        share an input scale, or an order of their weights for a CPU."""
        return any(
            weight.input_scale is not None
            or (weight.prepacked is not None and weight.values.is_meta)
            for weight in self.weights
        )

    def finish(self) -> None:
        """Ends loading. Projections that share a weight use the largest of their static input
        scales."""
        for weight in self.weights:
            if weight.input_scale is not None:
                weight.input_scale.copy_(weight.input_scale.max().expand_as(weight.input_scale))

    def workspace_bytes(self, tokens: int) -> int:
        """Returns an upper bound of the bytes of the result, and of the weight if it is dequantized
        as a whole."""
        total = 0
        for weight in self.weights:
            result = tokens * weight.outputs
            if weight.scales is None:
                total += result * weight.dtype.itemsize
            else:
                # In fp32 at most. Formats with groups need two more tensors of that size.
                copies = 3 if weight.format.group else 1
                total += 4 * (result + copies * weight.outputs * weight.inputs)
        return total

    def _output_range(self, output: Output) -> Range:
        """Returns [first, end) of the whole projection's outputs that this rank holds."""
        if self.split == "inputs":
            return 0, output.size
        shard = ShardSpec(0, output.unit, output.padded)
        name = f"{_dotted(self.name, output.name)}, outputs"
        return shard.bounds(output.size, self.group.rank, self.group.world, name)

    def _output_size(self, output: Output) -> int:
        if output.padded and self.split == "outputs":
            return -(-output.size // self.group.world)
        low, high = self._output_range(output)
        return high - low


def _dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
