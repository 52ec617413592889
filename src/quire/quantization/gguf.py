"""Quantized weights in GGUF files: rows of blocks with their own scales (ggml's types)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.errors import ConfigError, installing
from quire.ops import Weight, WeightFormat
from quire.quantization.checkpoint_tensor import CheckpointTensor, ProjectionShare, Range, expect
from quire.quantization.fields import Settings, Tensors, unsupported
from quire.quantization.packed import store_integers
from quire.quantization.quantization import Scheme

_BYTES = frozenset({torch.uint8})
_SMALLEST = 1e-12
"""Smallest scale of a group that is rounded to 8 bits."""
_EXACT_8 = WeightFormat(torch.int8, scales=torch.float16, group=32)
_EXACT_4 = WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=32)
_ROUNDED = WeightFormat(torch.int8, scales=torch.float32, group=32, zeros=True)
_FLOATS = WeightFormat(torch.float32)
"""Floats in the model's dtype; float32 here is a placeholder."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A quantized type of ggml.

    Attributes:
        weights: number of weights in a block.
        size: bytes of a block.
        format: the weight format into which blocks are converted. The conversion is exact for
            formats without zeros. Types with a minimum per group are rounded to 8 bits, because
            the minimum is not a multiple of the step. The 8-bit levels reach from the group's
            smallest weight to its largest. Types without a format of their own become floats.
    """

    weights: int
    size: int
    format: WeightFormat = _FLOATS


BLOCKS = {
    "Q8_0": BlockType(32, 34, _EXACT_8),
    "Q5_0": BlockType(32, 22, _EXACT_8),
    "IQ4_NL": BlockType(32, 18, _EXACT_8),
    "IQ4_XS": BlockType(256, 136, WeightFormat(torch.int8, scales=torch.float32, group=32)),
    "Q6_K": BlockType(256, 210, WeightFormat(torch.int8, scales=torch.float32, group=16)),
    "Q3_K": BlockType(256, 110, WeightFormat(torch.int8, scales=torch.float32, group=16)),
    "Q4_0": BlockType(32, 18, _EXACT_4),
    "MXFP4": BlockType(
        32, 17, WeightFormat(torch.uint8, 4, torch.float8_e8m0fnu, group=32, code="e2m1")
    ),
    "Q4_1": BlockType(32, 20, _ROUNDED),
    "Q5_1": BlockType(32, 24, _ROUNDED),
    "Q4_K": BlockType(256, 144, _ROUNDED),
    "Q5_K": BlockType(256, 176, _ROUNDED),
    "Q2_K": BlockType(
        256, 84, WeightFormat(torch.int8, scales=torch.float32, group=16, zeros=True)
    ),
    "IQ1_S": BlockType(256, 50),
    "IQ1_M": BlockType(256, 56),
    "IQ2_XXS": BlockType(256, 66),
    "IQ2_XS": BlockType(256, 74),
    "IQ2_S": BlockType(256, 82),
    "IQ3_XXS": BlockType(256, 98),
    "IQ3_S": BlockType(256, 110),
    "TQ1_0": BlockType(256, 54),
    "TQ2_0": BlockType(256, 66),
}
_EXPERT = re.compile(r"(\.mlp(?:\.experts)?\.(?:up|down))\.\d+(?=\.|$)")


def any_expert_name(module: str) -> str:
    """Returns a module's name with a star in place of the expert's number, because a file stores
    all experts in one tensor."""
    return _EXPERT.sub(r"\1.*", module)


@dataclass(frozen=True, slots=True)
class Gguf:
    """The quantized weights of a GGUF file.

    Attributes:
        types: ggml types of quantized weights, by `any_expert_name` of the module.
        dequantized: whether all weights become floats in the model's dtype.
    """

    types: Mapping[str, str]
    dequantized: bool = False

    @classmethod
    def from_settings(cls, settings: Settings) -> Gguf:
        types = settings.get("types")
        if not isinstance(types, Mapping):
            raise unsupported(f"types must be an object, got {types!r}")
        for module, name in types.items():
            if name not in BLOCKS:
                known = ", ".join(BLOCKS)
                raise unsupported(
                    f"{module} has the type {name}; expected one of: {known}, F16, BF16, F32"
                )
        return cls(types, bool(settings.get("dequantized")))

    def scheme(self, module: str, tensors: Tensors, *, head: bool) -> Scheme | None:
        name = self.types.get(any_expert_name(module))
        if name is None:
            return None
        format = _FLOATS if self.dequantized else BLOCKS[name].format
        return Scheme(format, (_BlockTensor("weight", "values", _BYTES, type=name),))


@dataclass(frozen=True, slots=True)
class _BlockTensor(CheckpointTensor):
    """Rows of blocks, uint8 [outputs, bytes of a row]. A rank reads whole rows."""

    type: str = ""

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        own = BLOCKS[self.type]
        return outputs, -(-inputs // own.weights) * own.size

    def ranges(self, share: ProjectionShare) -> tuple[Range, ...]:
        return share.rows, (0, self.shape(1, share.inputs)[1])

    def write(self, weight: Weight, part: Tensor, start: int, share: ProjectionShare) -> None:
        own = weight.rows(start, start + len(part))
        low, high = share.columns
        if weight.format.scales is None:
            found = dequantize_rows(part, self.type)[:, low:high]
            expect(found.isfinite().all(), "has weights that are not finite numbers")
            own.values.copy_(found)
            return
        zeros: Tensor | None = None
        if weight.format.zeros:
            wide = dequantize_rows(part, self.type)
            values, scales, zeros = _round_to_8_bits(wide, weight.format.group)
        else:
            values, scales = _EXACT[self.type](part)
        expect(scales.float().isfinite().all(), "has scales that are not finite")
        values = values[:, low:high]
        if weight.format.bits == 4:
            store_integers(own, values, 0, 0)
        else:
            own.values.copy_(values)
        group = weight.format.group
        touched = slice(low // group, -(-high // group))
        if own.scales is not None:
            own.scales.copy_(scales[:, touched])
        if own.zeros is not None and zeros is not None:
            own.zeros.copy_(zeros[:, touched])


def _halves(part: Tensor) -> Tensor:
    """Returns pairs of bytes [..., 2] as float16 [...]."""
    return part.contiguous().view(torch.float16).squeeze(-1)


def _q8_0(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 values, and a scale for every 32 values. A block is a scale and 32 integers."""
    blocks = rows.view(len(rows), -1, 34)
    values = blocks[:, :, 2:].contiguous().view(torch.int8)
    return values.flatten(1), _halves(blocks[:, :, :2])


def _q4_0(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns unsigned 4-bit values, and a scale for every 32 values.

    A block is a scale and 16 bytes. The low halves of the bytes are the first 16 integers, the high
    halves the others. Scales may be negative."""
    blocks = rows.view(len(rows), -1, 18)
    return _nibbles(blocks[:, :, 2:]).flatten(1), _halves(blocks[:, :, :2])


def _q6_k(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 values, and a scale for every 16 values.

    A block is the low 4 bits of 256 integers, their high 2 bits, 16 scales of 8 bits, and a factor
    for all scales."""
    blocks = rows.view(len(rows), -1, 210)
    low = blocks[:, :, :128].reshape(len(rows), -1, 2, 2, 32)
    high = blocks[:, :, 128:192].reshape(len(rows), -1, 2, 32)
    quarters = [low[..., 0, :] & 15, low[..., 1, :] & 15, low[..., 0, :] >> 4, low[..., 1, :] >> 4]
    whole = [part | (high >> 2 * i & 3) << 4 for i, part in enumerate(quarters)]
    values = torch.stack(whole, 3).flatten(1).view(torch.int8) - 32
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).float()
    scales = scales * _halves(blocks[:, :, 208:]).float().unsqueeze(2)
    return values, scales.flatten(1)


def _q5_0(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 values, and a scale for every 32 values.

    A block is a scale, the fifth bits of 32 integers, and their low 4 bits as in Q4_0."""
    blocks = rows.view(len(rows), -1, 22)
    places = torch.arange(8, dtype=torch.uint8, device=rows.device)
    high = (blocks[:, :, 2:6].unsqueeze(3) >> places & 1).flatten(2)
    values = (_nibbles(blocks[:, :, 6:]) | high << 4).view(torch.int8) - 16
    return values.flatten(1), _halves(blocks[:, :, :2])


def _iq4_nl(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 values, and a scale for every 32 values.

    A block is like one of Q4_0, but its integers are indices into a table."""
    blocks = rows.view(len(rows), -1, 18)
    return _lookup(_nibbles(blocks[:, :, 2:])).flatten(1), _halves(blocks[:, :, :2])


def _iq4_xs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 values, and a scale for every 32 values.

    A block is a factor for all scales, the high 2 and the low 4 bits of 8 scales, and 8 times 16
    bytes as in IQ4_NL."""
    blocks = rows.view(len(rows), -1, 136)
    above = blocks[:, :, 2:4].contiguous().view(torch.int16).int()
    high = above >> torch.arange(0, 16, 2, device=rows.device) & 3
    low = _pairs(blocks[:, :, 4:8])
    scales = ((low | high << 4) - 32).float() * _halves(blocks[:, :, :2]).float().unsqueeze(2)
    values = _nibbles(blocks[:, :, 8:].reshape(len(rows), -1, 8, 16))
    return _lookup(values).flatten(1), scales.flatten(1)


def _q3_k(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 values, and a scale for every 16 values.

    A block is the third bits of 256 integers, their low 2 bits, 16 scales of 6 bits, and a factor
    for all scales."""
    blocks = rows.view(len(rows), -1, 110)
    eight = torch.arange(8, dtype=torch.uint8, device=rows.device).view(8, 1)
    high = blocks[:, :, None, :32] >> eight & 1
    pairs = blocks[:, :, 32:96].reshape(len(rows), -1, 2, 1, 32) >> 2 * eight[:4] & 3
    values = (pairs.flatten(2, 3) | high << 2).view(torch.int8) - 4
    packed = blocks[:, :, 96:108]
    low = torch.cat([packed[:, :, :8] & 15, packed[:, :, :8] >> 4], 2)
    above = (packed[:, :, None, 8:] >> 2 * eight[:4] & 3).flatten(2)
    scales = ((low | above << 4).view(torch.int8) - 32).float()
    scales = scales * _halves(blocks[:, :, 108:]).float().unsqueeze(2)
    return values.flatten(1), scales.flatten(1)


def _mxfp4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes of 4-bit floats, and a power of two as the scale of every 32 values.

    A block is a scale and 16 bytes as in Q4_0."""
    blocks = rows.view(len(rows), -1, 17)
    scales = blocks[:, :, 0].contiguous().view(torch.float8_e8m0fnu)
    return _nibbles(blocks[:, :, 1:]).flatten(1), scales


def _nibbles(packed: Tensor) -> Tensor:
    """Returns the halves of bytes [..., n] as [..., 2 n]: all low halves, then all high halves."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _pairs(packed: Tensor) -> Tensor:
    """Returns the halves of bytes [..., n] as int32 [..., 2 n]: each byte's low half, then its high
    half."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()


def _lookup(places: Tensor) -> Tensor:
    table = torch.tensor(_NONLINEAR, dtype=torch.int8, device=places.device)
    return table[places.long()]


_NONLINEAR = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
"""The numbers of IQ4_NL and IQ4_XS."""
_EXACT = {
    "Q8_0": _q8_0,
    "Q5_0": _q5_0,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "Q6_K": _q6_k,
    "Q3_K": _q3_k,
    "Q4_0": _q4_0,
    "MXFP4": _mxfp4,
}


def dequantize_rows(rows: Tensor, type: str) -> Tensor:
    """Returns the weights in rows of blocks, uint8 [N, bytes of a row], as float32 [N, K].

    Raises:
        ConfigError: the `gguf` library is not installed.
    """
    gguf = library()
    found = gguf.dequantize(rows.cpu().numpy(), gguf.GGMLQuantizationType[type])
    return torch.from_numpy(found).to(rows.device)


def library() -> Any:
    """Returns the module `gguf`. Raises ConfigError if it is not installed.

    It is imported here because it is an optional dependency.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            f"GGUF files are read with a library; {installing('gguf')}", "model"
        ) from error
    return gguf


def _round_to_8_bits(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weights [N, K] rounded to 8 bits: int8 values, float32 scales of groups, int8
    zeros."""
    groups = F.pad(weight, (0, -weight.shape[1] % group)).view(len(weight), -1, group)
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    scales = ((high - low) / 255).clamp_(min=_SMALLEST)
    zeros = (-128 - low / scales).round_().clamp_(-128, 127)
    values = ((groups / scales.unsqueeze(2)) + zeros.unsqueeze(2)).round_().clamp_(-128, 127)
    return values.to(torch.int8).flatten(1)[:, : weight.shape[1]], scales, zeros
