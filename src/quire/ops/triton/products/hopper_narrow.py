"""Products of 17 to 32 rows and weights of 16 bits by TMA and wgmma, on Hopper cards.

A tile is 64 weight rows, the left operand, by BN rows of x. One warp copies weights and inputs by
TMA to a ring in shared memory, ahead of the warpgroup that multiplies.

Programs share the inputs of all tiles evenly (stream-K). Each has a run of chunks, which may begin
and end within a tile. A workspace collects the sums of a tile's programs, and the last one to
arrive adds them in order."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.errors import ConfigError
from quire.ops.triton.hopper_common import (
    barrier,
    concat,
    load_box,
    release_successor,
    sums_layout,
    wait_for_predecessor,
)
from quire.ops.triton.launch import options, traits
from quire.ops.triton.products.plan import Launch, LinearArgs
from quire.ops.triton.products.small import default_workspace

ROWS = gl.constexpr(64)
"""Weight rows of a tile."""
INPUTS = gl.constexpr(64)
"""Inputs of a chunk: 128 bytes, the width of the swizzle."""


@gluon.jit
def _begin(program, total, programs):
    """Returns where a program's run begins."""
    return program * total // programs


@gluon.jit
def _owner(position, total, programs):
    """Returns the program whose run contains a position."""
    return ((position + 1) * programs - 1) // total


@gluon.jit
def _ask_weights(desc, bar, tiles, stage, position, chunks, m_tiles):
    row = position // chunks // m_tiles * ROWS
    k = position % chunks * INPUTS
    load_box(desc, [row, k], bar.index(stage), tiles.index(stage))


@gluon.jit
def _ask_inputs(desc, bar, tiles, stage, position, chunks, m_tiles, BN: gl.constexpr):
    row = position // chunks % m_tiles * BN
    k = position % chunks * INPUTS
    load_box(desc, [row, k], bar.index(stage), tiles.index(stage))


@gluon.jit
def _produce(
    x_desc, w_desc, x_tiles, w_tiles, full, empty, M, m_tiles, chunks, total,
    BN: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Copies the operands of the program's chunks as soon as the ring has room."""
    X_BYTES: gl.constexpr = BN * INPUTS * 2
    BYTES: gl.constexpr = X_BYTES + ROWS * INPUTS * 2
    programs = gl.num_programs(0)
    begin = _begin(gl.program_id(0), total, programs)
    end = _begin(gl.program_id(0) + 1, total, programs)
    # Weights do not depend on the predecessor.
    first = gl.minimum(end, begin + STAGES)
    if PDL:
        # This load starts past the last row and returns zeros. It only brings the descriptor
        # to the multiprocessor.
        warm = full.index(STAGES)
        mbarrier.expect(warm, X_BYTES)
        load_box(x_desc, [M, 0], warm, x_tiles.index(0))
    for i in range(begin, first):
        mbarrier.expect(full.index(i - begin), BYTES)
        _ask_weights(w_desc, full, w_tiles, i - begin, i, chunks, m_tiles)
    if PDL:
        mbarrier.wait(full.index(STAGES), 0)
        wait_for_predecessor()
    for i in range(begin, first):
        _ask_inputs(x_desc, full, x_tiles, i - begin, i, chunks, m_tiles, BN)
    for i in range(first, end):
        stage = (i - begin) % STAGES
        mbarrier.wait(empty.index(stage), ((i - begin) // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), BYTES)
        _ask_weights(w_desc, full, w_tiles, stage, i, chunks, m_tiles)
        _ask_inputs(x_desc, full, x_tiles, stage, i, chunks, m_tiles, BN)


@gluon.jit
def _flat(sums, BN: gl.constexpr):
    """Returns sums [ROWS, BN] as [ROWS * BN / 4, 4]. A thread then has whole rows of 16 bytes,
    which it stores and loads at once."""
    x = gl.reshape(sums, [ROWS // 16, 2, 8, BN // 8, 4, 2])
    return gl.reshape(gl.permute(x, (3, 0, 2, 4, 1, 5)), [ROWS * BN // 4, 4])


@gluon.jit
def _square(flat, BN: gl.constexpr):
    """Returns the result of `_flat` in its original shape."""
    x = gl.permute(gl.reshape(flat, [BN // 8, ROWS // 16, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    return gl.convert_layout(gl.reshape(x, [ROWS, BN]), sums_layout(BN), assert_trivial=True)


@gluon.jit
def _sum_pointers(ptr, program, behind, layout: gl.constexpr, SIZE: gl.constexpr):
    """Returns the address for a program's sums of a tile. A program has one for its first tile, and
    one for its last tile (`behind`)."""
    slot = 2 * program + behind
    rows = gl.arange(0, SIZE // 4, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, 4, layout=gl.SliceLayout(0, layout))
    return ptr + slot.to(gl.int64) * SIZE + (rows[:, None] * 4 + cols[None, :])


@gluon.jit
def _reduce_split_k(
    sums, tile, chunks, total, parts_ptr, counters_ptr, BN: gl.constexpr
):  # fmt: skip
    """Returns a tile's sums over its programs, and whether they are complete.

    Only the last program to arrive has the complete sums."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    first = _owner(tile * chunks, total, programs)
    count = _owner((tile + 1) * chunks - 1, total, programs) - first + 1
    whole = count == 1
    if count > 1:
        SIZE: gl.constexpr = ROWS * BN
        flat = _flat(sums, BN)
        layout: gl.constexpr = flat.type.layout
        behind = (_begin(program, total, programs) // chunks != tile).to(gl.int32)
        gl.store(_sum_pointers(parts_ptr, program, behind, layout, SIZE), flat)
        barrier()  # All parts are written before the one atomic that signals them.
        counter_ptr = counters_ptr + first
        whole = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
        if whole:
            behind = (_begin(first, total, programs) // chunks != tile).to(gl.int32)
            # These loads bypass L1, which does not see other programs' writes. As many
            # loads are in flight as registers hold, because a load takes longer than the
            # additions.
            flat = gl.load(
                _sum_pointers(parts_ptr, first, behind, layout, SIZE), cache_modifier=".cg"
            )
            STEP: gl.constexpr = 2 * SIZE
            last = first + count
            for other in range(first + 1, last, 4):
                at = _sum_pointers(parts_ptr, other, 0, layout, SIZE)
                a = gl.load(at, cache_modifier=".cg")
                b = gl.load(at + STEP, mask=other + 1 < last, other=0.0, cache_modifier=".cg")
                c = gl.load(at + 2 * STEP, mask=other + 2 < last, other=0.0, cache_modifier=".cg")
                d = gl.load(at + 3 * STEP, mask=other + 3 < last, other=0.0, cache_modifier=".cg")
                flat = flat + a + b + c + d
            gl.store(counter_ptr, 0)
        sums = _square(flat, BN)
    return sums, whole


@gluon.jit
def _residual(nt, mt, M, N, res_ptr, stride_rm, BN: gl.constexpr):
    layout: gl.constexpr = sums_layout(BN)
    cols = nt * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    ms = mt * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    mask = (cols < N)[:, None] & (ms < M)[None, :]
    return gl.load(res_ptr + (ms[None, :] * stride_rm + cols[:, None]), mask=mask, other=0.0)


@gluon.jit
def _finish(
    y, added, nt, mt, M, N, bias_ptr, y_ptr, stride_ym, BN: gl.constexpr, BIAS: gl.constexpr
):  # fmt: skip
    """Computes the epilogue of a tile: bias, residual and store."""
    layout: gl.constexpr = sums_layout(BN)
    cols = nt * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    if BIAS:
        y = y + gl.load(bias_ptr + gl.minimum(cols, N - 1)).to(gl.float32)[:, None]
    y = y + added.to(gl.float32)
    ms = mt * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    mask = (cols < N)[:, None] & (ms < M)[None, :]
    # M is small, so offsets fit 32 bits.
    at = y_ptr + (ms[None, :] * stride_ym + cols[:, None])
    gl.store(at, y.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _consume(
    x_tiles, w_tiles, full, empty, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr,
    M, N, m_tiles, chunks, total, stride_rm, stride_ym,
    BN: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiplies the program's chunks."""
    begin = _begin(gl.program_id(0), total, gl.num_programs(0))
    end = _begin(gl.program_id(0) + 1, total, gl.num_programs(0))
    if PDL:
        wait_for_predecessor()
    position = begin
    while position < end:
        tile = position // chunks
        nt = tile // m_tiles
        mt = tile % m_tiles
        until = gl.minimum(end, (tile + 1) * chunks)
        acc = gl.zeros([ROWS, BN], gl.float32, sums_layout(BN))
        for i in range(position - begin, until - begin):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), i // STAGES & 1)
            w = w_tiles.index(stage)
            x = x_tiles.index(stage).permute((1, 0))
            acc = warpgroup_mma(w, x, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(
                empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > position - begin
            )
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((until - begin - 1) % STAGES), count=1)
        # The residual is loaded before the sums of other programs.
        added = _residual(nt, mt, M, N, res_ptr, stride_rm, BN)
        sums, whole = _reduce_split_k(acc, tile, chunks, total, parts_ptr, counters_ptr, BN)
        if whole:
            _finish(sums, added, nt, mt, M, N, bias_ptr, y_ptr, stride_ym, BN, BIAS)
        position = until


SIZES = ["M", "N", "m_tiles", "chunks", "total", "stride_rm", "stride_ym"]
"""Arguments whose values do not cause further compilations."""


@gluon.jit(do_not_specialize=SIZES)
def narrow_kernel(
    x_desc, w_desc, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr,
    M, N, m_tiles, chunks, total, stride_rm, stride_ym,
    BN: gl.constexpr, STAGES: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of x [M, K], w [N, K] and a residual.

    A tile is ROWS weight rows by BN rows of x. `total` is the number of chunks of all tiles. STAGES
    is the number of chunks in flight."""
    dtype: gl.constexpr = x_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BN, INPUTS], layout)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, INPUTS], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(full.index(STAGES), count=1)
    fence_async_shared()
    barrier()
    if PDL:
        release_successor()
    work = (
        x_tiles, w_tiles, full, empty, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr,
        M, N, m_tiles, chunks, total, stride_rm, stride_ym,
    )  # fmt: skip
    copies = (x_desc, w_desc, x_tiles, w_tiles, full, empty, M, m_tiles, chunks, total)
    multiplying: gl.constexpr = (BN, STAGES, BIAS, PDL)
    copying: gl.constexpr = (BN, STAGES, PDL)
    # The copying warp passes registers that it does not need to the other warps.
    gl.warp_specialize(
        [(_consume, concat(work, multiplying)), (_produce, concat(copies, copying))], [1], [24]
    )


# -- the launch --------------------------------------------------------------------------------

_ROWS = 64
"""Weight rows of a tile."""
_INPUTS = 64
"""Inputs of a chunk."""
_STAGES = 9
"""Chunks in flight: the most with which two programs fit a multiprocessor."""
_REGISTERS = 128
"""The most registers of a thread with which two programs fit a multiprocessor."""
_MOST_PARTS = 5
"""The most programs that share a tile. One of them has to add the sums of all."""
FEWEST, MOST = 17, 32
"""Range of rows for which this kernel was the fastest. Outside of it, other kernels are as fast."""


def takes(args: LinearArgs) -> bool:
    """Whether the kernel supports a layer.

    It needs 17 to 32 rows, 16-bit weights of x's dtype, and rows that TMA can copy. The layer must
    have a residual, no norm and no activation, and so few outputs that programs share tiles."""
    x, values = args.x, args.weight.values
    if not FEWEST <= len(x) <= MOST or args.norm is not None or args.act is not None:
        return False
    if args.residual is None or args.weight.scales is not None or x.dtype != values.dtype:
        return False
    if x.dtype not in (torch.bfloat16, torch.float16) or parts_of(args) < 2:
        return False
    return all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 for t in (x, values))


def parts_of(args: LinearArgs) -> int:
    """Returns the number of programs that share a tile, or 0 if there are more tiles than programs.

    It is the largest number for which all programs run at once and have at least two chunks."""
    tiles = triton.cdiv(args.n, _ROWS)
    most = min(_MOST_PARTS, triton.cdiv(args.k, _INPUTS) // 2)
    return min(traits(args.x.device).num_sms // tiles, most)


def product(args: LinearArgs) -> Tensor:
    """Returns y [M, N], see `LinearArgs`, for a layer that passes `takes`."""
    x = args.x
    out = torch.empty(len(x), args.n, dtype=x.dtype, device=x.device)
    counters = default_workspace(x.device).counters
    narrow(args, out, parts_of(args), counters, pdl=traits(x.device).pdl).run()
    return out


def narrow(args: LinearArgs, out: Tensor, parts: int, counters: Tensor, *, pdl: bool) -> Launch:
    """Returns the launch that writes the layer `args` to `out` [M, N].

    The layer has a residual, no norm and no activation.

    Args:
        parts: number of programs that share a tile.
        counters: int32, one for each program, zero between kernels.
    """
    x, values, res = args.x, args.weight.values, args.residual
    if res is None:
        raise ConfigError("this kernel needs a residual", "residual")
    m_tiles = triton.cdiv(len(x), MOST)
    chunks = triton.cdiv(args.k, _INPUTS)
    tiles = triton.cdiv(args.n, _ROWS) * m_tiles
    programs = tiles * min(parts, chunks)
    sums = torch.empty(2 * programs * _ROWS * MOST, dtype=torch.float32, device=x.device)
    operands = (
        _describe(x, MOST), _describe(values, _ROWS), x if args.bias is None else args.bias, res,
        out, sums, counters, len(x), args.n, m_tiles, chunks, tiles * chunks, res.stride(0),
        out.stride(0),
    )  # fmt: skip
    named = options(
        pdl, BN=MOST, STAGES=_STAGES, BIAS=args.bias is not None, PDL=pdl, num_warps=4,
        maxnreg=_REGISTERS,
    )  # fmt: skip
    return Launch(narrow_kernel, (programs,), operands, named)


def _describe(values: Tensor, rows: int) -> TensorDescriptor:
    """Describes boxes of a matrix's rows to TMA."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(
        values, list(values.shape), list(values.stride()), [rows, _INPUTS], layout
    )
