"""Checkpoint tensors with several unsigned integers in an int32, as in AWQ and GPTQ, and their
scales, zeros and group indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.ops import Weight
from quire.quantization.checkpoint_tensor import CheckpointTensor, ProjectionShare, Range, expect

INT32 = frozenset({torch.int32})
IN_ORDER = tuple(range(8))
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place of each of eight neighbouring outputs in an int32 of AWQ, in units of 4 bits."""


def unpack(words: Tensor, bits: int, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """Returns the integers of int32 words [..., n] as uint8 [..., n * 32 / bits].

    Args:
        words: int32 [..., n].
        bits: number of bits of an integer.
        order: place of each integer in its word; 0 stands for the lowest bits.
    """
    places = torch.tensor(order[: 32 // bits], dtype=torch.int32, device=words.device)
    integers = (words.unsqueeze(-1) >> (places * bits)).bitwise_and_(2**bits - 1)
    return integers.to(torch.uint8).flatten(-2)


def store_integers(weight: Weight, values: Tensor, row: int, column: int) -> None:
    """Stores unsigned integers, uint8 [outputs, inputs], in a weight from [row, column] on.

    8-bit integers are stored minus 128, as int8. 4-bit integers are stored two in a byte, with the
    even input in the low half.
    """
    own = weight.values[row : row + len(values)]
    if not weight.format.bits:
        own[:, column : column + values.shape[1]] = (values ^ 128).view(torch.int8)
        return
    for parity, keep in ((0, 0xF0), (1, 0x0F)):
        skipped = (parity - column) % 2
        part = values[:, skipped::2]
        first = (column + skipped) // 2
        target = own[:, first : first + part.shape[1]]
        target.bitwise_and_(keep).bitwise_or_(part << 4 if parity else part)


def _clip(values: Tensor, first: int, size: int, dim: int) -> tuple[Tensor, int]:
    """Clips values along `dim` to the places [0, size).

    Args:
        values: the values to clip.
        first: place of the first value, which may be negative.
        size: number of places.
        dim: the axis.

    Returns:
        The clipped values and the place of their first entry.
    """
    low, high = max(first, 0), min(first + values.shape[dim], size)
    return values.narrow(dim, low - first, max(0, high - low)), low


@dataclass(frozen=True, slots=True)
class PackedValues(CheckpointTensor):
    """Integers that are packed into int32 along one axis.

    Attributes:
        bits: number of bits of an integer.
        axis: the axis along which integers are packed.
        inputs_first: whether the tensor is [inputs, outputs].
        order: see `unpack`.
    """

    bits: int = 4
    axis: Literal["inputs", "outputs"] = "inputs"
    inputs_first: bool = False
    order: tuple[int, ...] = IN_ORDER

    def _packing(self) -> tuple[int, int]:
        """Returns how many outputs and how many inputs an int32 holds."""
        each = 32 // self.bits
        return (1, each) if self.axis == "inputs" else (each, 1)

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        outputs_per, inputs_per = self._packing()
        shape = -(-outputs // outputs_per), -(-inputs // inputs_per)
        return shape[::-1] if self.inputs_first else shape

    def ranges(self, share: ProjectionShare) -> tuple[Range, ...]:
        outputs_per, inputs_per = self._packing()
        ranges = (
            (share.rows[0] // outputs_per, -(-share.rows[1] // outputs_per)),
            (share.columns[0] // inputs_per, -(-share.columns[1] // inputs_per)),
        )
        return ranges[::-1] if self.inputs_first else ranges

    def write(self, weight: Weight, part: Tensor, start: int, share: ProjectionShare) -> None:
        outputs_per, inputs_per = self._packing()
        begin = [
            (share.rows[0] // outputs_per) * outputs_per - share.rows[0],
            (share.columns[0] // inputs_per) * inputs_per - share.columns[0],
        ]
        if self.inputs_first:
            begin[1] += start * inputs_per
        else:
            begin[0] += start * outputs_per
        words = part.t() if self.inputs_first else part
        if self.axis == "inputs":
            values = unpack(words, self.bits, self.order)
        else:
            values = unpack(words.t(), self.bits, self.order).t()
        values, row = _clip(values, begin[0], share.rows[1] - share.rows[0], 0)
        values, column = _clip(values, begin[1], share.columns[1] - share.columns[0], 1)
        store_integers(weight, values, row, column)


@dataclass(frozen=True, slots=True)
class GroupScales(CheckpointTensor):
    """Scales [groups, outputs]. If `inputs_per` is None, all inputs form one group."""

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return (1 if self.inputs_per is None else -(-inputs // self.inputs_per)), outputs

    def ranges(self, share: ProjectionShare) -> tuple[Range, ...]:
        columns = (0, share.inputs) if self.every_group else share.columns
        per = self.inputs_per
        return ((0, 1) if per is None else (columns[0] // per, -(-columns[1] // per))), share.rows

    def write(self, weight: Weight, part: Tensor, start: int, share: ProjectionShare) -> None:
        self.check(part)
        if weight.scales is not None:
            weight.scales[:, start : start + len(part)] = part.t()


@dataclass(frozen=True, slots=True)
class PackedZeros(GroupScales):
    """Zeros that are packed into int32 along the outputs, n in each.

    Attributes:
        bits: number of bits of a zero.
        order: see `unpack`.
        outputs_first: whether the tensor is [outputs / n, groups] instead of [groups, outputs / n].
        expected: for symmetric weights, the allowed values of stored zeros. All zeros of a tensor
            must be equal. Empty for asymmetric weights.
        offset: added to each stored zero, modulo 2 ** bits.
    """

    bits: int = 4
    order: tuple[int, ...] = IN_ORDER
    outputs_first: bool = False
    expected: tuple[int, ...] = ()
    offset: int = 0

    # `super()` does not work in dataclasses with slots, so the base class is named.
    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        groups, _ = GroupScales.shape(self, outputs, inputs)
        shape = groups, -(-outputs * self.bits // 32)
        return shape[::-1] if self.outputs_first else shape

    def ranges(self, share: ProjectionShare) -> tuple[Range, ...]:
        groups, _ = GroupScales.ranges(self, share)
        each = 32 // self.bits
        ranges = groups, (share.rows[0] // each, -(-share.rows[1] // each))
        return ranges[::-1] if self.outputs_first else ranges

    def write(self, weight: Weight, part: Tensor, start: int, share: ProjectionShare) -> None:
        each = 32 // self.bits
        words = part.t() if self.outputs_first else part
        zeros = unpack(words, self.bits, self.order).t()
        first = (share.rows[0] // each) * each - share.rows[0]
        zeros, row = _clip(
            zeros,
            first + (start * each if self.outputs_first else 0),
            share.rows[1] - share.rows[0],
            0,
        )
        if self.expected:
            if zeros.numel():
                one = zeros.flatten()[0]
                allowed = torch.tensor(self.expected, dtype=torch.uint8, device=zeros.device)
                fits = (zeros == one).all() & (one == allowed).any()
                names = " or ".join(str(zero) for zero in self.expected)
                expect(fits, f"has zeros that are not all {names}, although sym is true")
            return
        if weight.zeros is None:
            raise ModelError("has zeros, but the weight format stores none")
        zeros = (zeros + self.offset) & (2**self.bits - 1)
        if self.bits == 8:
            zeros = zeros ^ 128
        group = 0 if self.outputs_first else start
        own = weight.zeros[row : row + len(zeros)]
        own[:, group : group + zeros.shape[1]] = zeros.view(torch.int8)


@dataclass(frozen=True, slots=True)
class GroupIndex(CheckpointTensor):
    """The group of each input, [inputs].

    If the weight's format keeps no group index, inputs must be in order, `inputs_per` to a group.
    """

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return (inputs,)

    def ranges(self, share: ProjectionShare) -> tuple[Range, ...]:
        return (share.columns,)

    def write(self, weight: Weight, part: Tensor, start: int, share: ProjectionShare) -> None:
        if weight.groups is not None:
            groups = -(-share.inputs // (self.inputs_per or share.inputs))
            inside = ((part >= 0) & (part < groups)).all()
            expect(inside, f"has group indices outside 0 to {groups - 1}")
            most = self.inputs_per or share.inputs
            fits = torch.bincount(part).max() <= most
            expect(fits, f"puts more than {most} inputs into a group")
            weight.groups[start : start + len(part)] = part
            return
        places = torch.arange(len(part), device=part.device) + share.columns[0] + start
        per = self.inputs_per
        regular = torch.zeros_like(places) if per is None else places // per
        expect((part == regular).all(), "puts inputs into groups out of order, unlike the config")


@dataclass(frozen=True, slots=True)
class WeightShape(CheckpointTensor):
    """The shape (outputs, inputs) of a packed tensor, [2]. It is only checked."""

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return (2,)

    def ranges(self, share: ProjectionShare) -> tuple[Range, ...]:
        return ((0, 2),)

    def write(self, weight: Weight, part: Tensor, start: int, share: ProjectionShare) -> None:
        expected = [share.outputs, share.inputs][start : start + len(part)]
        if part.tolist() != expected:
            raise ModelError(f"holds {part.tolist()}, expected {expected}")


@dataclass(frozen=True, slots=True)
class ZeroBias(CheckpointTensor):
    """A bias [outputs] in the checkpoint for a layer without bias. It must be zero."""

    def write(self, weight: Weight, part: Tensor, start: int, share: ProjectionShare) -> None:
        expect((part == 0).all(), "is a bias that is not zero, but the layer has no bias")
