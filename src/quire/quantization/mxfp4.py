"""Checkpoints with experts in MXFP4, as gpt-oss stores them: 4-bit floats with a power of two as
scale for 32 inputs (OCP Microscaling Formats)."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from quire.ops import Weight, WeightFormat
from quire.quantization import fields
from quire.quantization.checkpoint_tensor import CheckpointTensor, ProjectionShare, Range, expect
from quire.quantization.compressed_tensors import BYTES, Exponents
from quire.quantization.fields import Settings, Tensors
from quire.quantization.quantization import Scheme

_GROUP = 32
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """The settings of an MXFP4 checkpoint.

    Attributes:
        exceptions: shell patterns of modules that are not quantized.
    """

    exceptions: tuple[str, ...]

    @classmethod
    def from_settings(cls, settings: Settings) -> Mxfp4:
        return cls(fields.names(settings, "modules_to_not_convert"))

    def scheme(self, module: str, tensors: Tensors, *, head: bool) -> Scheme | None:
        if not module.endswith(_EXPERTS) or any(
            fnmatchcase(module, pattern) for pattern in self.exceptions
        ):
            return None
        format = WeightFormat(
            torch.uint8, bits=4, scales=torch.float8_e8m0fnu, group=_GROUP, code="e2m1"
        )
        stored = (
            ExpertBlocks("blocks", "values", BYTES),
            Exponents("scales", "scales", BYTES, 1, _GROUP),
        )
        return Scheme(format, stored)


@dataclass(frozen=True, slots=True)
class ExpertBlocks(CheckpointTensor):
    """Values in blocks of 32, uint8 [outputs, blocks, 16], with the even input in a byte's low
    half."""

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        return outputs, -(-inputs // _GROUP), _GROUP // 2

    def ranges(self, share: ProjectionShare) -> tuple[Range, ...]:
        low, high = share.columns
        return share.rows, (low // _GROUP, -(-high // _GROUP)), (0, _GROUP // 2)

    def write(self, weight: Weight, part: Tensor, start: int, share: ProjectionShare) -> None:
        first = share.columns[0] % _GROUP // 2
        values = part.flatten(1)
        own = values[:, first : first + weight.values.shape[1]]
        expect(
            torch.tensor(own.shape[1] == weight.values.shape[1]),
            "has fewer values than the layer has inputs",
        )
        weight.values[start : start + len(part)].copy_(own, non_blocking=True)
