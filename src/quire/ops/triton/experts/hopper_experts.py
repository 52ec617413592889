"""Launches `hopper_experts_kernel.py`: experts' products of many tokens on Hopper cards."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.ops.experts import ExpertWeights, Swiglu
from quire.ops.triton.experts.hopper_experts_kernel import experts_kernel
from quire.ops.triton.experts.plan import RingTile
from quire.ops.triton.experts.route import Sorted
from quire.ops.triton.launch import launch, options, traits
from quire.ops.triton.products.common import wait_for_predecessor

BOX = 64
"""Tokens of a warpgroup's part of a tile, and inputs of a copy."""
HALF = 128
"""Weight rows of a copy; a tile has two copies."""
_SWIZZLE = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def boxes(x: Tensor, rows: int) -> TensorDescriptor:
    """Describes x [rows, inputs] to TMA, for copies in boxes of `rows` rows and 64 inputs."""
    return TensorDescriptor(x, [*x.shape], [x.stride(0), 1], [rows, BOX], _SWIZZLE)


@triton.jit(do_not_specialize=["most"])
def gather_kernel(
    x_ptr, order_ptr, blocks_ptr, most, y_ptr, K, stride_xm,
    ROWS_PER_X: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copies the rows of x of all assignments to y [A, K], in the order of experts.

    Grid: places in that order, tiles of K."""
    if PDL:
        wait_for_predecessor(False)
    count = tl.load(blocks_ptr + 3 * most)
    place = tl.program_id(0)
    if count == 0:
        return
    if place >= tl.load(blocks_ptr + 2 * most + count - 1):
        return
    ks = tl.program_id(1) * BK + tl.arange(0, BK)
    row = (tl.load(order_ptr + place) // ROWS_PER_X).to(tl.int64)
    x = tl.load(x_ptr + row * stride_xm + ks, mask=ks < K)
    tl.store(y_ptr + place.to(tl.int64) * K + ks, x, mask=ks < K)


def gather_rows(x: Tensor, order: Sorted, rows_per_x: int) -> Tensor:
    """Returns the rows of x of all assignments, in the order of experts."""
    k, pdl = x.shape[1], traits(x.device).pdl
    out = torch.empty(len(order.order), k, dtype=x.dtype, device=x.device)
    bk = min(4096, triton.next_power_of_2(k))
    launch(gather_kernel, (len(out), triton.cdiv(k, bk)))(
        x, order.order, order.blocks, order.most, out, k, x.stride(0), ROWS_PER_X=rows_per_x,
        BK=bk, PDL=pdl, **options(pdl, num_warps=4),
    )  # fmt: skip
    return out


def ring_product(
    tile: RingTile, x: Tensor, order: Sorted, weights: Tensor, linear: ExpertWeights,
    act: Swiglu | None, out: Tensor,
) -> None:  # fmt: skip
    """Writes the product of x [A, K], whose rows are in the order of experts, to out [A, N].

    With an activation it writes gated units in the same order. Otherwise it writes outputs times
    routing weights, in the order of assignments."""
    n, k, values = out.shape[1], x.shape[1], linear.weight.values
    card = traits(x.device)
    tiles = triton.cdiv(n, HALF if act is not None else 2 * HALF)
    own = act or Swiglu()
    launch(experts_kernel, (min(card.num_sms, order.most * tiles),))(
        boxes(x, BOX), boxes(values, HALF),
        order.order, weights, x if linear.bias is None else linear.bias, out, order.blocks,
        order.most, tiles, n, k, GATED=act is not None, DENSE=False,
        HAS_BIAS=linear.bias is not None, ALPHA=own.alpha, LIMIT=own.limit, SHIFT=own.shift,
        CUBIC=own.cubic, STAGES=tile.stages, PDL=card.pdl,
        **options(card.pdl, num_warps=4),
    )  # fmt: skip
