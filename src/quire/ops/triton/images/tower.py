"""The parts of a tower's layer between its products: rotation and attention within segments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.reference import images as reference
from quire.ops.triton.launch import launch, traits

_SHORT = torch.float16, torch.bfloat16


@triton.jit
def _rotate_heads(
    heads_ptr, angles_ptr, stride_t, stride_p, stride_h,
    HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_PAD: tl.constexpr, HALF_PAD: tl.constexpr,
):  # fmt: skip
    """Rotates the heads of one part of a token. Grid: (tokens, parts)."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_PAD)
    head = tl.arange(0, HEADS_PAD)
    in_half = pair < HALF
    inside = (head < HEADS)[:, None] & in_half[None, :]
    cos = tl.load(angles_ptr + token * 2 * HALF + pair, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angles_ptr + token * 2 * HALF + HALF + pair, mask=in_half, other=0.0)[None, :]
    at = heads_ptr + token * stride_t + tl.program_id(1) * stride_p
    at = at + head[:, None] * stride_h + pair[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    kind = heads_ptr.dtype.element_ty
    tl.store(at, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(at + HALF, (second * cos + first * sin).to(kind), mask=inside)


def rotate_heads(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotates heads in place, and returns them. See `reference.images.rotate_heads`."""
    tokens, parts, count, dim = heads.shape
    launch(_rotate_heads, (tokens, parts))(
        heads, angles, *heads.stride()[:3], HEADS=count, HALF=dim // 2,
        HEADS_PAD=triton.next_power_of_2(count), HALF_PAD=triton.next_power_of_2(dim // 2),
        num_warps=4,
    )  # fmt: skip
    return heads


def segment_attention(
    qkv: Tensor, starts: Tensor, longest: int, reach: int | None = None
) -> Tensor:
    """Returns the outputs of attention within segments. See `reference.images.segment_attention`.

    PyTorch's Flash Attention takes 16 bits and heads of multiples of 8, on sm_80 and newer.
    """
    q, k, v = qkv.unbind(1)
    fits = qkv.dtype in _SHORT and q.shape[-1] % 8 == 0
    if not fits or traits(qkv.device).capability < (8, 0):
        return reference.segment_attention(qkv, starts, longest, reach)
    # Imported here because it imports torch._dynamo, which takes more than a second at each start.
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, -1) if reach is None else (reach, reach)
    found = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=window)
    assert isinstance(found, Tensor)
    return found
