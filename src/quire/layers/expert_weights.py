"""The weights of one projection for all experts of a layer, and their layouts in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from quire import ops
from quire.errors import ModelError
from quire.layers.build import Build
from quire.layers.parameter_slice import ParameterSlice
from quire.ops.experts import ExpertWeights, expands
from quire.quantization import CheckpointTensor, ProjectionShare, Quantization, Range, Scheme

Layout = Literal["each", "fused", "transposed", "interleaved"]
"""Layout of experts in a checkpoint.

"each": one tensor for each projection of each expert.
"fused": one tensor for all experts, [experts, outputs, inputs]; all gates come first, then all ups.
"transposed": as "fused", but float tensors are [experts, inputs, outputs].
"interleaved": one tensor for all experts, in which gates and ups alternate. Float tensors are
[experts, inputs, outputs].
"""


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """The part of a projection's weights that one rank holds.

    Attributes:
        experts: [first, end) of the experts on this rank.
        rows: [first, end) of each projection's outputs.
        columns: [first, end) of the inputs.
        count: experts of the whole layer.
        outputs: outputs of the whole projection.
        inputs: inputs of the whole projection.
    """

    experts: Range
    rows: Range
    columns: Range
    count: int
    outputs: int
    inputs: int

    def share(self) -> ProjectionShare:
        return ProjectionShare(self.rows, self.columns, self.outputs, self.inputs)


_SCHEMES: WeakKeyDictionary[Quantization, dict[tuple[object, ...], Scheme]] = WeakKeyDictionary()
"""Cached results of `experts_scheme`. A model may have 45,000 projections, and the search for a
number of ranks calls `experts_scheme` for every number that it tries."""


def experts_scheme(names: Sequence[str], layout: Layout, build: Build, count: int) -> Scheme:
    """Returns the scheme that all experts' projections have in common.

    Args:
        names: projections that share a weight, such as ("gate", "up"); ("",) for a single one.
        layout: layout of the checkpoint.
        build: see `Build`. Its name is the projection's name.
        count: experts of the layer.

    Raises:
        ModelError: the schemes differ, or each projection has its own order of inputs.
    """
    found = _SCHEMES.setdefault(build.quantization, {})
    key = build.name, tuple(names), layout, build.dtype, count
    if key not in found:
        found[key] = _common_scheme(names, layout, build, count)
    return found[key]


def _common_scheme(names: Sequence[str], layout: Layout, build: Build, count: int) -> Scheme:
    wanted = [build.within(name).name if name else build.name for name in names]
    if layout == "each":
        wanted = [
            ".".join(filter(None, (build.name, str(expert), name)))
            for expert in range(count)
            for name in names
        ]
    elif layout == "interleaved":
        wanted = [build.name]
    schemes = [build.quantization.scheme_for(name, build.dtype) for name in wanted]
    for name, scheme in zip(wanted, schemes, strict=True):
        if scheme != schemes[0]:
            raise ModelError(
                f"{name} and {wanted[0]} are quantized in different ways "
                f"({_difference(scheme, schemes[0])}), which is not supported for experts of one "
                "layer"
            )
    if not schemes[0].stacks:
        raise ModelError(f"{build.name}: act order is not supported for experts")
    return schemes[0]


def _difference(one: Scheme, other: Scheme) -> str:
    """Returns the first difference between two schemes, for an error message."""
    for field in fields(one.format):
        own, others = (getattr(scheme.format, field.name) for scheme in (one, other))
        if own != others:
            return f"{field.name}: {own} and {others}"
    own, others = ([stored.name for stored in scheme.stored] for scheme in (one, other))
    return f"tensors: {', '.join(own)} and {', '.join(others)}"


class ExpertLinear(nn.Module):
    """The weights of one projection, or of gate and up together, for this rank's experts.

    Args:
        names: projections that share the weight, ("",) for a single one.
        shard: the part of the weights that this rank holds.
        scheme: the weight's format and its tensors in the checkpoint.
        layout: layout of the checkpoint.
        build: see `Build`.
        bias: whether the projections have biases. If ranks split the inputs, only the first rank
            adds them.
    """

    def __init__(
        self,
        names: Sequence[str],
        shard: ExpertShard,
        scheme: Scheme,
        layout: Layout,
        build: Build,
        *,
        bias: bool,
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        self.shard = shard
        self.scheme = scheme
        self.layout = layout
        self.count = shard.experts[1] - shard.experts[0]
        self.size = shard.rows[1] - shard.rows[0]
        width = shard.columns[1] - shard.columns[0]
        if width % scheme.format.packed:
            raise ModelError(
                f"{build.name}: {width} inputs cannot be stored {scheme.format.packed} to a byte"
            )
        self._columns = width
        # The sum over ranks must contain each bias once.
        self.own_bias = shard.columns[0] == 0
        self._make(build.device, build.dtype if bias else None)

    def _make(self, device: torch.device, bias: torch.dtype | None) -> None:
        """Creates uninitialized parameters for `count` experts.

        Args:
            device: holds them.
            bias: the dtype of the biases, or None without biases.
        """
        self.weight = ops.Weight.empty(
            self.scheme.format, self.count * len(self.names) * self.size, self._columns, device,
            before=self.shard.columns[0], whole=self.shard.inputs,
            stacked=self.count * len(self.names),
        )  # fmt: skip
        for name in ("values", "scales", "zeros", "input_scale"):
            tensor = getattr(self.weight, name)
            if tensor is not None:
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.bias: nn.Parameter | None = None
        if bias is not None:
            shape = self.count, len(self.names) * self.size
            tensor = torch.empty(shape, device=device, dtype=bias)
            self.bias = nn.Parameter(tensor, requires_grad=False)

    def grow(self, more: int) -> None:
        """Appends `more` uninitialized experts to the loaded ones."""
        old = [self.tensors(expert) for expert in range(self.count)]
        self.count += more
        self._make(self.weight.values.device, None if self.bias is None else self.bias.dtype)
        for expert, tensors in enumerate(old):
            for new, tensor in zip(self.tensors(expert), tensors, strict=True):
                new.copy_(tensor)

    def tensors(self, expert: int) -> list[Tensor]:
        """Returns views of all tensors of one expert. `expert` counts from this rank's first."""
        each = len(self.names)
        weight = self.weight.rows(expert * each * self.size, (expert + 1) * each * self.size)
        found = [weight.values, weight.scales, weight.zeros]
        found.append(None if self.bias is None else self.bias.data[expert])
        return [tensor for tensor in found if tensor is not None]

    @property
    def weights(self) -> ExpertWeights:
        """Returns the weights in the form that the experts' op takes."""
        bias = self.bias if self.own_bias else None
        first, end = self.shard.experts
        # The total with copies is estimated from this rank. Shares differ by at most one expert,
        # and all ranks have equally many copies.
        return ExpertWeights(
            self.weight, self.count, bias, round(self.count * self.shard.count / (end - first))
        )

    @property
    def updates_whole(self) -> bool:
        """See `Linear.updates_whole`."""
        return self.weight.input_scale is not None

    def finish(self) -> None:
        """Ends loading. All experts use the largest of their static input scales."""
        scale = self.weight.input_scale
        if scale is not None:
            scale.copy_(scale.max().expand_as(scale))

    def slices(self) -> Iterator[ParameterSlice]:
        """Yields this rank's part of each of the checkpoint's tensors."""
        if self.layout == "each":
            yield from self._separate_slices()
        elif self.layout in ("fused", "transposed"):
            for place in range(len(self.names)):
                yield from self._fused_slices(place)
        else:
            for stored in self.scheme.stored:
                yield self._interleaved_slice(stored)
            if self.bias is not None:
                yield self._interleaved_bias_slice(self.bias.data)

    def _rows(self, expert: int, place: int) -> ops.Weight:
        """Returns the weight of projection `place` of expert `expert`, which counts from this
        rank's first."""
        index = expert * len(self.names) + place
        return self.weight.rows(index * self.size, (index + 1) * self.size, index)

    def _biases(self, place: int) -> Tensor | None:
        """Returns the biases of projection `place`, [experts, outputs], or None."""
        if self.bias is None:
            return None
        return self.bias.data[:, place * self.size : (place + 1) * self.size]

    def _separate_slices(self) -> Iterator[ParameterSlice]:
        share, (first, end) = self.shard.share(), self.shard.experts
        for expert in range(self.shard.count):
            for place, name in enumerate(self.names):
                prefix = ".".join(filter(None, (str(expert), name)))
                own = first <= expert < end
                weight = self._rows(expert - first, place) if own else None
                for stored in self.scheme.stored:
                    yield self._slice(f"{prefix}.{stored.name}", weight, stored, share)
                bias = self._biases(place)
                if bias is not None:
                    rows = self.shard.rows if own else (0, 0)
                    target = bias[expert - first if own else 0]
                    yield ParameterSlice.for_tensor(
                        f"{prefix}.bias", target, (self.shard.outputs,), (rows,)
                    )

    def _slice(
        self, name: str, weight: ops.Weight | None, stored: CheckpointTensor, share: ProjectionShare
    ) -> ParameterSlice:
        """Returns the slice of one expert's tensor; it is empty if another rank holds the expert.

        Args:
            name: name of the tensor below this module.
            weight: the expert's weight, or None if another rank holds it.
            stored: how the tensor becomes part of the weight.
            share: this rank's share of the projection.
        """

        def write(part: Tensor, start: int) -> None:
            if weight is not None:
                stored.write(weight, part, start, share)

        shape, ranges = stored.shape(share.outputs, share.inputs), stored.ranges(share)
        if weight is None:
            ranges = ((0, 0),) * len(shape)
        device = self.weight.values.device
        return ParameterSlice(name, shape, ranges, write, device, stored.dtypes)

    def _fused_slices(self, place: int) -> Iterator[ParameterSlice]:
        prefix = f"{self.names[place]}." if self.names[place] else ""
        whole = self.shard.outputs * len(self.names)
        before = self.shard.outputs * place
        rows = before + self.shard.rows[0], before + self.shard.rows[1]
        share = ProjectionShare(rows, self.shard.columns, whole, self.shard.inputs)
        for stored in self.scheme.stored:
            name = f"{prefix}{stored.name}"
            part = self._fused_slice(name, place, stored, share, turned=False)
            if self.layout == "transposed" and stored.name == "weight":
                # transformers 5 saves some models in its own layout.
                turned = self._fused_slice(name, place, stored, share, turned=True)
                part = replace(turned, other=part)
            yield part
        bias = self._biases(place)
        if bias is not None:
            shape, ranges = (self.shard.count, whole), (self.shard.experts, rows)
            yield ParameterSlice.for_tensor(f"{prefix}bias", bias, shape, ranges)

    def _fused_slice(
        self,
        name: str,
        place: int,
        stored: CheckpointTensor,
        share: ProjectionShare,
        *,
        turned: bool,
    ) -> ParameterSlice:
        """Returns this rank's part of one projection in a tensor of all experts.

        Args:
            name: name of the tensor below this module.
            place: index of the projection.
            stored: how an expert's part of the tensor becomes part of the weight.
            share: this rank's share of all projections in the tensor.
            turned: whether the tensor is [experts, inputs, outputs].
        """
        shape, ranges = stored.shape(share.outputs, share.inputs), stored.ranges(share)
        if turned:
            shape, ranges = shape[::-1], ranges[::-1]

        def write(part: Tensor, start: int) -> None:
            for expert, own in enumerate(part, start):
                stored.write(self._rows(expert, place), own.t() if turned else own, 0, share)

        return ParameterSlice(
            name,
            (self.shard.count, *shape),
            (self.shard.experts, *ranges),
            write,
            self.weight.values.device,
            stored.dtypes,
        )

    def _interleaved_slice(self, stored: CheckpointTensor) -> ParameterSlice:
        share, turns = self.shard.share(), len(self.names)
        shape = stored.shape(self.shard.outputs * turns, self.shard.inputs)
        (low, high), *rest = stored.ranges(share)
        ranges: list[Range] = [(low * turns, high * turns), *rest]
        transposed = stored.name == "weight"
        if transposed:
            shape, ranges = shape[::-1], ranges[::-1]

        def write(part: Tensor, start: int) -> None:
            for expert, own in enumerate(part, start):
                rows = own.t() if transposed else own
                for place in range(turns):
                    stored.write(self._rows(expert, place), rows[place::turns], 0, share)

        return ParameterSlice(
            stored.name, (self.shard.count, *shape), (self.shard.experts, *ranges), write,
            self.weight.values.device, stored.dtypes,
        )  # fmt: skip

    def _interleaved_bias_slice(self, target: Tensor) -> ParameterSlice:
        turns, (low, high) = len(self.names), self.shard.rows

        def write(part: Tensor, start: int) -> None:
            own = target[start : start + len(part)].view(len(part), turns, -1)
            own.copy_(part.view(len(part), -1, turns).transpose(1, 2), non_blocking=True)

        shape = self.shard.count, self.shard.outputs * turns
        ranges = self.shard.experts, (low * turns, high * turns)
        return ParameterSlice("bias", shape, ranges, write, target.device)

    def workspace_bytes(self, rows: int) -> int:
        """Returns an upper bound of the bytes of the results for `rows` rows, in fp32."""
        return 4 * rows * len(self.names) * self.size

    def expanded_bytes(self, rows: int) -> int:
        """Returns the bytes of the weights in 16 bits if `rows` rows expand them, else 0."""
        own, weight = self.weights, self.weight
        values = weight.outputs * weight.inputs
        return 2 * values if expands(weight.format, rows, own.total) else 0


def even_shard(size: int, unit: int, rank: int, world: int) -> Range:
    """Returns [first, end) of one rank's share of `size`, in whole units.

    Shares differ by one unit at most. The last unit may be shorter than the others.
    """
    units = -(-size // unit)
    low, high = rank * units // world, (rank + 1) * units // world
    return low * unit, min(high * unit, size)


def fp32_parameter(shape: int, build: Build) -> nn.Parameter:
    """Returns an uninitialized fp32 parameter [shape]."""
    tensor = torch.empty(shape, device=build.device, dtype=torch.float32)
    return nn.Parameter(tensor, requires_grad=False)
