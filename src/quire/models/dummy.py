"""Random weights for a folder that holds only a config.json.

Each value is a hash of the seed, the tensor's name and the element's index. So it is the same on
every device and rank, and in every dtype up to rounding.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.layers.parameter_slice import ParameterSlice, named_slices
from quire.quantization import FLOATS
from quire.quantization.checkpoint_tensor import FP8

_DEVIATION = 0.02
_BYTES = frozenset({torch.uint8})
_EXPONENT = 127 - 7
"""Exponent of the scale of MXFP4 weights, which gives them about the same standard deviation."""
_FP8_SCALE = 2.0**-13
"""The scale of FP8 weights. The largest number before scaling is then 284; FP8 ends at 448."""
_INPUT_SCALE = 2.0**-5
"""A static input scale: inputs up to 14 are not clipped."""


def fill_dummy(model: torch.nn.Module, seed: int) -> None:
    """Makes norms the identity, and all other weights uniform with standard deviation 0.02.

    Raises:
        ModelError: the checkpoint's layers are quantized to a format other than FP8 and MXFP4.
    """
    for name, part in named_slices(model):
        if part.device.type == "meta":
            continue  # Another stage of the pipeline holds the parameter.
        if part.dtypes not in (FLOATS, FP8, _BYTES):
            raise ModelError(
                f"dummy weights cannot be stored in the checkpoint's format ({name}); remove "
                "quantization_config from config.json, and use --quantization to round them"
            )
        value = _constant(part)
        if value is None:
            _fill(part, _key(seed, name))
        else:
            sizes = [high - low for low, high in part.ranges]
            dtype = torch.uint8 if part.dtypes == _BYTES else torch.float32
            part.write(torch.full(sizes, value, dtype=dtype, device=part.device), 0)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def _fill(part: ParameterSlice, key: int) -> None:
    (top, bottom), *inner = part.ranges
    device, whole = part.device, math.prod(part.shape[1:])
    columns = torch.zeros(1, dtype=torch.int64, device=device)
    for (left, right), size in zip(inner, part.shape[1:], strict=True):
        places = torch.arange(left, right, device=device)
        columns = (columns.unsqueeze(1) * size + places).flatten()
    columns = _wrap_int32(columns)
    # On a CPU, a small chunk stays in the cache during all passes of the hash.
    step = max(1, (1 << 15 if device.type == "cpu" else 1 << 24) // max(1, len(columns)))
    for start in range(top, bottom, step):
        own = torch.arange(start, min(start + step, bottom), dtype=torch.int64, device=device)
        index = _wrap_int32(own * whole).unsqueeze(1) + columns
        values = _hash(index.bitwise_xor_(key)) >> 8
        sizes = [len(own), *(right - left for left, right in inner)]
        part.write(_from_bits(values, part).view(sizes), start - top)


def _constant(part: ParameterSlice) -> int | float | None:
    """Returns the number that fills the whole tensor, or None if it is random."""
    if part.initial != "random":
        return float(part.initial == "ones")
    if not part.name.endswith(("scale", "scales", "scale_inv")):
        return None
    if part.dtypes == _BYTES:
        return _EXPONENT
    return _INPUT_SCALE if part.name.endswith(("input_scale", "activation_scale")) else _FP8_SCALE


def _from_bits(values: Tensor, part: ParameterSlice) -> Tensor:
    """Returns the elements of a tensor from 24 random bits each: floats, FP8, or pairs of 4-bit
    floats."""
    if part.dtypes == _BYTES:
        return (values & 255).to(torch.uint8)
    floats = values.float().mul_(_DEVIATION * math.sqrt(3.0) / 2**23)
    return floats if part.dtypes == FLOATS else floats.div_(_FP8_SCALE).to(torch.float8_e4m3fn)


def _wrap_int32(x: Tensor) -> Tensor:
    return ((x + 2**31) % 2**32 - 2**31).to(torch.int32)


def _hash(x: Tensor) -> Tensor:
    """Scrambles int32 values in place, by shifts and odd multipliers (the "lowbias32" constants of
    C. Wellons's hash prospector)."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
