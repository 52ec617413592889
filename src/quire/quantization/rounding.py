"""Quantizes an unquantized checkpoint to 8 or 4 bits while it is loaded, by rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.config import QUANTIZATIONS
from quire.errors import ConfigError
from quire.ops import Weight, WeightFormat
from quire.ops.reference.quantized import quantize_rows, row_scales
from quire.quantization.checkpoint_tensor import (
    FLOATS,
    CheckpointTensor,
    ProjectionShare,
    Range,
    expect,
)
from quire.quantization.packed import store_integers
from quire.quantization.quantization import Quantization, Scheme, Unquantized

FORMATS = {
    "int8": WeightFormat(torch.int8, scales=torch.float32),
    "fp8": WeightFormat(torch.float8_e4m3fn, scales=torch.float32),
    "w8a8": WeightFormat(torch.int8, scales=torch.float32, inputs="token"),
    "w8a8_fp8": WeightFormat(torch.float8_e4m3fn, scales=torch.float32, inputs="token"),
    "int4": WeightFormat(torch.uint8, bits=4, scales=torch.float16, group=128, zeros=True),
}
"""Weight formats of layers, by the names in `config.QUANTIZATIONS`."""

FLOAT = "float"
"""Name of the quantization that dequantizes a GGUF file's weights to the model's dtype."""
_SMALLEST = 2.0**-14
"""Smallest scale of 4-bit groups, because float16 loses precision below."""
_AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 22}
"""Number of weights that a thread rounds at once, by type of device. Rounding takes about 16 bytes
of memory per weight. On a GPU, larger pieces need fewer launches."""


@dataclass(frozen=True, slots=True)
class _RoundedTensor(CheckpointTensor):
    """Floats that are rounded to the weight's format.

    A rank reads all inputs of its outputs, even if it keeps only a part of them. So scales and
    rounded weights do not depend on the number of ranks.
    """

    def ranges(self, share: ProjectionShare) -> tuple[Range, ...]:
        return share.rows, (0, share.inputs)

    def write(self, weight: Weight, part: Tensor, start: int, share: ProjectionShare) -> None:
        rows = max(1, _AT_ONCE.get(part.device.type, part.numel()) // part.shape[1])
        for first in range(0, len(part), rows):
            piece = part[first : first + rows]
            expect(piece.isfinite().all(), "has weights that are not finite numbers")
            own = weight.rows(start + first, start + first + len(piece))
            _round(own, piece, share.columns)


def _round(weight: Weight, part: Tensor, columns: Range) -> None:
    """Rounds floats [outputs, all inputs] to the weight's format, and stores the columns."""
    if weight.format.bits == 4:
        _round_groups(weight, part, columns)
        return
    scales = row_scales(part, weight.dtype)
    values = quantize_rows(part, scales, weight.dtype)
    weight.values.copy_(values[:, columns[0] : columns[1]])
    if weight.scales is not None:
        weight.scales.copy_(scales)


def _round_groups(weight: Weight, part: Tensor, columns: Range) -> None:
    """Rounds floats [outputs, all inputs] to 4 bits, and stores the columns.

    The 16 levels reach from a group's smallest number to its largest, and include 0.
    """
    group = weight.format.group
    inputs = part.shape[1]
    groups = F.pad(part.float(), (0, -inputs % group)).view(len(part), -1, group)
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    scales = ((high - low) / 15).clamp_(min=_SMALLEST).half()
    wide = scales.float()
    zeros = (-low / wide).round_().clamp_(0, 15)
    values = (groups / wide.unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, 15)
    values = values.view(len(part), -1)[:, columns[0] : columns[1]]
    store_integers(weight, values.to(torch.uint8), 0, 0)
    touched = slice(columns[0] // group, -(-columns[1] // group))
    if weight.scales is not None and weight.zeros is not None:
        weight.scales.copy_(scales[:, touched])
        weight.zeros.copy_(zeros[:, touched])


def rounding_of(name: str) -> Quantization:
    """Returns the quantization of layers, of the head, or of both.

    Args:
        name: `EngineArgs.quantization`, such as "int8" or "fp8,head=int8".

    Raises:
        ConfigError: a format is unknown, or two are given for layers or for the head.
    """
    layers, head = split_name(name)
    # "float" dequantizes, but the weights of an unquantized checkpoint are floats already.
    own = Unquantized() if layers in (None, FLOAT) else Rounding(FORMATS[layers])
    return own if head is None else QuantizedHead(own, head)


def split_name(name: str) -> tuple[str | None, str | None]:
    """Returns the names of the formats for layers and for the head. None stands for the format in
    the checkpoint.

    Raises:
        ConfigError: as in `rounding_of`.
    """
    layers: str | None = None
    head: str | None = None
    for part in name.split(","):
        of_head = part.startswith("head=")
        if part not in QUANTIZATIONS or (head if of_head else layers) is not None:
            raise ConfigError(
                f"unknown quantization {name!r}; give a format for layers, one for the head, or "
                f"both: {', '.join(QUANTIZATIONS)}",
                "quantization",
            )
        if of_head:
            head = part.removeprefix("head=")
        else:
            layers = part
    return layers, head


class QuantizedHead:
    """Stores the head in 8 bits, and layers in the formats of another quantization. A tied head
    becomes a quantized copy of the embeddings."""

    own_head = True

    def __init__(self, layers: Quantization, name: str) -> None:
        self._layers = layers
        self._name = name

    def scheme_for(self, projection: str, dtype: torch.dtype) -> Scheme:
        scheme = self._layers.scheme_for(projection, dtype)
        if projection != "head":
            return scheme
        if scheme.format.scales is not None:
            raise ConfigError(
                f"quantization=head={self._name}: the checkpoint's head is quantized already",
                "quantization",
            )
        return Scheme(FORMATS[self._name], (_RoundedTensor("weight", "values", FLOATS),))


class Rounding(Unquantized):
    """Stores the layers' weights in a format of 8 or 4 bits. The head and the projections from
    latents stay in floats; latent attention multiplies by these projections as floats."""

    def __init__(self, format: WeightFormat) -> None:
        self.format = format

    def scheme_for(self, projection: str, dtype: torch.dtype) -> Scheme:
        if projection == "head" or projection.endswith(".kv_b"):
            return super().scheme_for(projection, dtype)
        return Scheme(self.format, (_RoundedTensor("weight", "values", FLOATS),))
