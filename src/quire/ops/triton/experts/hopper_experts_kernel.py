"""The kernel of `hopper_experts.py` and `hopper_gated.py`, by TMA and wgmma.

It multiplies tokens in the order of their experts, or all tokens by one weight. A tile is a block
of tokens of one expert by 256 of its weight rows, and a program computes several tiles. One warp
copies inputs and weights into a ring in shared memory. It runs ahead of two warpgroups with 64
tokens of the block each. A warpgroup without tokens only releases the stages of the ring."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.ops.triton.hopper_common import (
    barrier,
    concat,
    load_box,
    reinterpret,
    sums_layout,
    wait_and_release,
)

ROWS = gl.constexpr(64)
"""Tokens of a warpgroup."""
WARPGROUPS = gl.constexpr(2)
"""Number of warpgroups that multiply."""
GROUP = gl.constexpr(16)
"""Number of blocks whose tiles are computed one after the other, because they share weights."""
HALF = gl.constexpr(128)
"""Weight rows of a copy: gate rows or the matching up rows, or half of a tile's outputs."""
INPUTS = gl.constexpr(64)
"""Inputs of a copy: 128 bytes, the width of the swizzle."""


@gluon.constexpr_function
def _lines() -> gl.DistributedLinearLayout:
    """Returns the layout of a warpgroup's [ROWS, HALF] outputs in which each thread has 8
    neighbouring columns of a row. Warps keep the rows that they have in an accumulator."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 128],
    )  # fmt: skip


@gluon.jit
def _count(blocks_ptr, most, DENSE: gl.constexpr):
    """Returns the number of blocks."""
    if DENSE:
        count = (most + WARPGROUPS * ROWS - 1) // (WARPGROUPS * ROWS)
    else:
        count = gl.load(blocks_ptr + 3 * most)
    return count


@gluon.jit
def _block(place, blocks_ptr, most, tiles, DENSE: gl.constexpr):
    """Returns four values for the tile at `place`: its index among the block's tiles, the expert,
    the place of the block's first token, and the block's number of tokens."""
    # Tiles that run at the same time share blocks and weights.
    group = place // (GROUP * tiles)
    inside = place % (GROUP * tiles)
    size = gl.minimum(_count(blocks_ptr, most, DENSE) - group * GROUP, GROUP)
    block = group * GROUP + inside % size
    if DENSE:
        expert = block * 0
        start = block * (WARPGROUPS * ROWS)
        end = most
    else:
        expert = gl.load(blocks_ptr + block)
        start = gl.load(blocks_ptr + most + block)
        end = gl.load(blocks_ptr + 2 * most + block)
    rows = gl.minimum(end - start, WARPGROUPS * ROWS)
    return inside // size, expert, start, rows


@gluon.jit
def _produce(
    x_desc, w_desc, x_tiles, w_halves, full, empty, blocks_ptr, most, tiles, N, K,
    GATED: gl.constexpr, DENSE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    done = 0
    steps = (K + INPUTS - 1) // INPUTS
    end = _count(blocks_ptr, most, DENSE) * tiles
    for place in range(gl.program_id(0), end, gl.num_programs(0)):
        tile, expert, start, rows = _block(place, blocks_ptr, most, tiles, DENSE)
        if GATED:
            gates = expert * 2 * N + tile * HALF
            others = gates + N
        else:
            gates = expert * N + tile * 2 * HALF
            others = gates + HALF
        for step in range(steps):
            stage = (done + step) % STAGES
            mbarrier.wait(empty.index(stage), ((done + step) // STAGES + 1) & 1)
            bar = full.index(stage)
            k = step * INPUTS
            mbarrier.expect(bar, (ROWS + 2 * HALF) * INPUTS * 2, pred=rows <= ROWS)
            mbarrier.expect(bar, (2 * ROWS + 2 * HALF) * INPUTS * 2, pred=rows > ROWS)
            load_box(w_desc, [gates, k], bar, w_halves.index(stage * 2))
            load_box(w_desc, [others, k], bar, w_halves.index(stage * 2 + 1))
            for part in gl.static_range(WARPGROUPS):
                load_box(
                    x_desc, [start + part * ROWS, k], bar,
                    x_tiles.index(stage * WARPGROUPS + part), pred=part * ROWS < rows,
                )  # fmt: skip
        done += steps


@gluon.jit
def _swiglu(
    gate, up, ALPHA: gl.constexpr, LIMIT: gl.constexpr, SHIFT: gl.constexpr, CUBIC: gl.constexpr
):
    """See `kernels.swiglu`."""
    if LIMIT > 0:
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
    slope = ALPHA
    if CUBIC != 0:
        slope = ALPHA + CUBIC * gate * gate
    return gate / (1.0 + gl.exp(-slope * gate)) * (up + SHIFT)


@gluon.jit
def _store(
    acc, place, order_ptr, weights_ptr, bias_ptr, y_ptr, blocks_ptr, most, tiles, N,
    GATED: gl.constexpr, DENSE: gl.constexpr, HAS_BIAS: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, SHIFT: gl.constexpr, CUBIC: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Stores a warpgroup's sums [ROWS, 2 HALF].

    They are stored as units in the order of experts, or as outputs times routing weights in the
    order of assignments."""
    sums: gl.constexpr = sums_layout(HALF)
    layout: gl.constexpr = _lines()
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    tile, expert, start, rows = _block(place, blocks_ptr, most, tiles, DENSE)
    first, second = gl.split(gl.permute(gl.reshape(acc, [ROWS, 2, HALF]), (0, 2, 1)))
    first = gl.convert_layout(first, sums)
    second = gl.convert_layout(second, sums)
    own = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    valid = own < rows
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    of_sums = gl.arange(0, HALF, layout=gl.SliceLayout(0, sums))
    if GATED:
        if HAS_BIAS:
            cols = tile * HALF + of_sums
            at = bias_ptr + expert * 2 * N + cols
            first += gl.load(at, mask=cols < N, other=0.0).to(gl.float32)[None, :]
            second += gl.load(at + N, mask=cols < N, other=0.0).to(gl.float32)[None, :]
        y = _swiglu(first, second, ALPHA, LIMIT, SHIFT, CUBIC).to(dtype)
        cols = tile * HALF + columns
        lines = y_ptr + (start + own).to(gl.int64)[:, None] * N
        mask = valid[:, None] & (cols < N)[None, :]
        gl.store(lines + cols[None, :], gl.convert_layout(y, layout), mask=mask)
    else:
        of_rows = WHICH * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums))
        a = gl.load(order_ptr + start + of_rows, mask=of_rows < rows, other=0)
        share = gl.load(weights_ptr + a, mask=of_rows < rows, other=0.0)[:, None]
        if HAS_BIAS:
            cols = tile * 2 * HALF + of_sums
            at = bias_ptr + expert * N + cols
            first += gl.load(at, mask=cols < N, other=0.0).to(gl.float32)[None, :]
            second += gl.load(at + HALF, mask=cols + HALF < N, other=0.0).to(gl.float32)[None, :]
        places = gl.load(order_ptr + start + own, mask=valid, other=0)
        lines = y_ptr + places.to(gl.int64)[:, None] * N
        cols = tile * 2 * HALF + columns
        mask = valid[:, None] & (cols < N)[None, :]
        y = gl.convert_layout((first * share).to(dtype), layout)
        gl.store(lines + cols[None, :], y, mask=mask)
        mask = valid[:, None] & (cols + HALF < N)[None, :]
        y = gl.convert_layout((second * share).to(dtype), layout)
        gl.store(lines + HALF + cols[None, :], y, mask=mask)


@gluon.jit
def _consume(
    order_ptr, weights_ptr, bias_ptr, y_ptr, x_tiles, w_tiles, full, empty, blocks_ptr, most, tiles,
    N, K, GATED: gl.constexpr, DENSE: gl.constexpr, HAS_BIAS: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, SHIFT: gl.constexpr, CUBIC: gl.constexpr, STAGES: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    done = 0
    steps = (K + INPUTS - 1) // INPUTS
    end = _count(blocks_ptr, most, DENSE) * tiles
    for place in range(gl.program_id(0), end, gl.num_programs(0)):
        _, _, _, rows = _block(place, blocks_ptr, most, tiles, DENSE)
        if rows > WHICH * ROWS:
            acc = gl.zeros([ROWS, 2 * HALF], gl.float32, layout=sums_layout(2 * HALF))
            for i in range(done, done + steps):
                stage = i % STAGES
                mbarrier.wait(full.index(stage), (i // STAGES) & 1)
                x = x_tiles.index(stage * WARPGROUPS + WHICH)
                w = w_tiles.index(stage).permute((1, 0))
                acc = warpgroup_mma(x, w, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > done)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((done + steps - 1) % STAGES), count=1)
            _store(
                acc, place, order_ptr, weights_ptr, bias_ptr, y_ptr, blocks_ptr, most, tiles, N,
                GATED, DENSE, HAS_BIAS, ALPHA, LIMIT, SHIFT, CUBIC, WHICH,
            )  # fmt: skip
        else:
            for i in range(done, done + steps):
                mbarrier.wait(full.index(i % STAGES), (i // STAGES) & 1)
                mbarrier.arrive(empty.index(i % STAGES), count=1)
        done += steps


@gluon.jit(do_not_specialize=["most"])
def experts_kernel(
    x_desc, w_desc, order_ptr, weights_ptr, bias_ptr, y_ptr, blocks_ptr, most, tiles, N, K,
    GATED: gl.constexpr, DENSE: gl.constexpr, HAS_BIAS: gl.constexpr, ALPHA: gl.constexpr,
    LIMIT: gl.constexpr, SHIFT: gl.constexpr, CUBIC: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Computes y [A, N] of inputs in the order of experts.

    y is gated units in the same order, or outputs times routing weights in the order of
    assignments. Grid: programs that share the tiles.

    Args:
        x_desc: inputs [A, K] in boxes of ROWS.
        w_desc: rows of all experts' weights in boxes of HALF.
        DENSE: there is one gated weight for `most` tokens. Blocks, order and routing weights are
            not read.
    """
    dtype: gl.constexpr = y_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES * WARPGROUPS, ROWS, INPUTS], layout)
    w_halves = gl.allocate_shared_memory(dtype, [STAGES * 2, HALF, INPUTS], layout)
    w_tiles = reinterpret(w_halves, dtype, [STAGES, 2 * HALF, INPUTS], layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=WARPGROUPS)
    fence_async_shared()
    barrier()
    if PDL:
        wait_and_release()
    own = (
        order_ptr, weights_ptr, bias_ptr, y_ptr, x_tiles, w_tiles, full, empty, blocks_ptr, most,
        tiles, N, K,
    )  # fmt: skip
    first: gl.constexpr = (GATED, DENSE, HAS_BIAS, ALPHA, LIMIT, SHIFT, CUBIC, STAGES, 0)
    second: gl.constexpr = (GATED, DENSE, HAS_BIAS, ALPHA, LIMIT, SHIFT, CUBIC, STAGES, 1)
    ring: gl.constexpr = (GATED, DENSE, STAGES)
    copies = (x_desc, w_desc, x_tiles, w_halves, full, empty, blocks_ptr, most, tiles, N, K)
    # The copying warp passes registers that it does not need to the other warps.
    gl.warp_specialize(
        [
            (_consume, concat(own, first)), (_consume, concat(own, second)),
            (_produce, concat(copies, ring)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
