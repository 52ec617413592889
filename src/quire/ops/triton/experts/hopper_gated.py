"""Gated layers of many tokens on Hopper cards, by the kernel of `hopper_experts_kernel.py`.

The kernel applies the activation before it stores the sums."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from quire.ops.experts import GELU_TANH, SILU
from quire.ops.triton.experts.hopper_experts import BOX, HALF, boxes
from quire.ops.triton.experts.hopper_experts_kernel import experts_kernel
from quire.ops.triton.experts.mma import aligned
from quire.ops.triton.experts.plan import RingTile
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.products.plan import LinearArgs

_ACTS = {"silu_and_mul": SILU, "gelu_tanh_and_mul": GELU_TANH}
_ROWS = 2048
"""The fewest tokens for which this kernel is faster than cuBLAS and a separate activation."""


def takes(args: LinearArgs) -> bool:
    """Whether the kernel supports a layer.

    It needs a gated activation, 16 bits, many tokens, rows that begin at multiples of 16 bytes, and
    no norm, bias or residual."""
    x, values = args.x, args.weight.values
    return (
        len(x) >= _ROWS
        and args.act in _ACTS
        and all(added is None for added in (args.norm, args.bias, args.residual))
        and args.weight.scales is None
        and x.dtype == values.dtype in (torch.bfloat16, torch.float16)
        and aligned(x)
        and aligned(values)
    )


def gated_product(args: LinearArgs) -> Tensor:
    """Returns the gated units [M, N] of x [M, K], for layers that pass `takes`."""
    x, n, card = args.x, args.n, traits(args.x.device)
    own, tile = _ACTS[args.act or ""], RingTile()
    out = torch.empty(len(x), n, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(n, HALF)
    launch(experts_kernel, (min(card.num_sms, triton.cdiv(len(x), tile.bm) * tiles),))(
        boxes(x, BOX), boxes(args.weight.values, HALF), x, x, x, out, x, len(x), tiles, n,
        x.shape[1], GATED=True, DENSE=True, HAS_BIAS=False, ALPHA=own.alpha, LIMIT=own.limit,
        SHIFT=own.shift, CUBIC=own.cubic, STAGES=tile.stages, PDL=card.pdl,
        **options(card.pdl, num_warps=4),
    )  # fmt: skip
    return out
