"""Weights of GGUF files: rows of blocks, each with its own scales (ggml's quantized types)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.errors import ConfigError
from quire.extras import installing
from quire.ops import Weight, WeightFormat
from quire.quantization.fields import Settings, Tensors, refused
from quire.quantization.packed import put
from quire.quantization.scheme import Scheme
from quire.quantization.stored_tensor import ProjectionShare, Range, StoredTensor, expect

_BYTES = frozenset({torch.uint8})
_SMALLEST = 1e-12
"""The smallest scale of rounded groups."""
_ROUNDED = WeightFormat(torch.int8, scales=torch.float32, group=32, zeros=True)
_FORMATS = {
    "Q8_0": WeightFormat(torch.int8, scales=torch.float16, group=32),
    "Q4_0": WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=32),
    "Q6_K": WeightFormat(torch.int8, scales=torch.float32, group=16),
    "Q4_K": _ROUNDED,
    "Q5_K": _ROUNDED,
}
"""The format that each type becomes. The first three hold a file's numbers exactly. The minima of
the others are no multiples of their steps: these are rounded to 8 bits with a zero, 256 steps from
the least weight of a group to its largest."""
BLOCKS = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q6_K": (256, 210),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
}
"""The weights of a block of each type, and its bytes."""


@dataclass(frozen=True, slots=True)
class Gguf:
    """types: of modules whose weights are blocks, the names of their types."""

    types: Mapping[str, str]

    @classmethod
    def of(cls, settings: Settings) -> Gguf:
        types = settings.get("types")
        if not isinstance(types, Mapping):
            raise refused(f"types must be an object, got {types!r}")
        for module, name in types.items():
            if name not in _FORMATS:
                known = ", ".join(_FORMATS)
                raise refused(f"{module} has the type {name}; known are: {known}, F16, BF16, F32")
        return cls(types)

    def scheme(self, module: str, tensors: Tensors, *, head: bool) -> Scheme | None:
        name = self.types.get(module)
        if name is None:
            return None
        return Scheme(_FORMATS[name], (_Blocks("weight", "values", _BYTES, type=name),))


@dataclass(frozen=True, slots=True)
class _Blocks(StoredTensor):
    """Rows of blocks of a type, bytes [outputs, bytes of a row]. A rank reads whole rows."""

    type: str = ""

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        each, size = BLOCKS[self.type]
        return outputs, -(-inputs // each) * size

    def ranges(self, share: ProjectionShare) -> tuple[Range, ...]:
        return share.rows, (0, self.shape(1, share.inputs)[1])

    def write(self, weight: Weight, part: Tensor, start: int, share: ProjectionShare) -> None:
        if weight.format == _ROUNDED:
            values, scales, zeros = _rounded(dequantize_rows(part, self.type))
        else:
            values, scales = _EXACT[self.type](part)
            zeros = None
        expect(scales.isfinite().all(), "has scales that are not finite")
        own = weight.rows(start, start + len(part))
        low, high = share.columns
        values = values[:, low:high]
        if weight.format.bits == 4:
            put(own, values, 0, 0)
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
    """Returns int8 values, and scales of 32: a block is a scale and 32 integers."""
    blocks = rows.view(len(rows), -1, 34)
    values = blocks[:, :, 2:].contiguous().view(torch.int8)
    return values.flatten(1), _halves(blocks[:, :, :2])


def _q4_0(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns unsigned 4-bit values, and scales of 32: a block is a scale and 16 bytes, whose low
    halves are the first 16 integers. Scales may be negative."""
    blocks = rows.view(len(rows), -1, 18)
    packed = blocks[:, :, 2:]
    values = torch.cat([packed & 15, packed >> 4], 2)
    return values.flatten(1), _halves(blocks[:, :, :2])


def _q6_k(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 values, and scales of 16: a block is the low halves of 256 integers, the pairs
    of bits above, 16 scales of 8 bits and one that multiplies all."""
    blocks = rows.view(len(rows), -1, 210)
    low = blocks[:, :, :128].reshape(len(rows), -1, 2, 2, 32)
    high = blocks[:, :, 128:192].reshape(len(rows), -1, 2, 32)
    quarters = [low[..., 0, :] & 15, low[..., 1, :] & 15, low[..., 0, :] >> 4, low[..., 1, :] >> 4]
    whole = [part | (high >> 2 * i & 3) << 4 for i, part in enumerate(quarters)]
    values = torch.stack(whole, 3).flatten(1).view(torch.int8) - 32
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).float()
    scales = scales * _halves(blocks[:, :, 208:]).float().unsqueeze(2)
    return values, scales.flatten(1)


_EXACT = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q6_K": _q6_k}


def dequantize_rows(rows: Tensor, type: str) -> Tensor:
    """Returns bytes [N, bytes of a row] as the float32 [N, K] that they stand for.

    Raises:
        ConfigError: the library that reads such files is not installed.
    """
    gguf = library()
    found = gguf.dequantize(rows.cpu().numpy(), gguf.GGMLQuantizationType[type])
    return torch.from_numpy(found).to(rows.device)


def library() -> Any:
    """Returns the module `gguf`. Raises ConfigError where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            f"GGUF files are read with a library; {installing('gguf')}", "model"
        ) from error
    return gguf


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weights [N, K] rounded to 8 bits: int8 values, float32 scales of 32, int8 zeros."""
    groups = F.pad(weight, (0, -weight.shape[1] % 32)).view(len(weight), -1, 32)
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    scales = ((high - low) / 255).clamp_(min=_SMALLEST)
    zeros = (-128 - low / scales).round_().clamp_(-128, 127)
    values = ((groups / scales.unsqueeze(2)) + zeros.unsqueeze(2)).round_().clamp_(-128, 127)
    return values.to(torch.int8).flatten(1)[:, : weight.shape[1]], scales, zeros
