"""The kernel of `hopper_blocks.py`: wgmma on 8-bit floats with a scale for each 128 inputs.

A tile is some weight rows, the left operand, by BN rows of x. One warp copies both and the scales
of x by TMA to a ring in shared memory. It runs ahead of two warpgroups that share the weight rows.
The product of a chunk of 128 inputs has its own registers. It is multiplied by the scales of its
inputs and weights and added to the accumulator in fp32. While one warpgroup scales and adds, the
tensor cores work for the other. In a gated layer a tile's weight rows are 8 gate rows, the 8
matching up rows, and so on, so that a thread has sums of both.

If there are few tiles, programs share the inputs of all tiles evenly (stream-K). Each has a run of
chunks, which may begin and end within a tile, and `reduce_split_k` of `hopper_gemm_kernel.py` adds
their sums. Otherwise each program has whole tiles. Tiles that run at the same time are close to
each other, so that their operands are in L2."""

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
    release_successor,
    sums_layout,
    wait_for_predecessor,
)
from quire.ops.triton.products.hopper_gemm_kernel import (
    ROWS,
    activate,
    begin_of,
    halves,
    reduce_split_k,
    stored_rows,
)

CONSUMERS = gl.constexpr(2)
"""Warpgroups that multiply."""
INPUTS = gl.constexpr(128)
"""Inputs of a chunk: 128 bytes, the width of the swizzle."""
BAND = gl.constexpr(16)
"""Tiles of rows of x that run at the same time."""


@gluon.constexpr_function
def product_layout(columns: int) -> gl.NVMMADistributedLayout:
    """Returns the layout of a warpgroup's product [64, columns] of 8-bit floats."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.constexpr_function
def _lines(outputs: int) -> gl.BlockedLayout:
    """Returns the layout of [rows of x, outputs] in which a thread has 8 neighbouring outputs."""
    return gl.BlockedLayout([1, 8], [256 // outputs, outputs // 8], [4, 1], [1, 0])


@gluon.jit
def _tile(place, SHARED: gl.constexpr):
    """Returns the index of the tile at a place in the program's order."""
    tile = place
    if not SHARED:
        tile = gl.program_id(0) + place * gl.num_programs(0)
    return tile


@gluon.jit
def _where(tile, m_tiles, n_tiles):
    """Returns a tile's index along the outputs and along the rows of x."""
    band = tile // (BAND * n_tiles)
    inside = tile % (BAND * n_tiles)
    height = gl.minimum(m_tiles - band * BAND, BAND)
    return inside // height, band * BAND + inside % height


@gluon.jit
def _run(chunks, total, SHARED: gl.constexpr):
    """Returns the begin and the end of a program's run of chunks, counted in its tiles."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if SHARED:
        begin = begin_of(program, total, programs)
        end = begin_of(program + 1, total, programs)
    else:
        begin = program * 0
        end = (total // chunks - program + programs - 1) // programs * chunks
    return begin, end


@gluon.jit
def _span(position, end, chunks, m_tiles, n_tiles, SHARED: gl.constexpr):
    """Returns four values for the tile at a position: its index along the outputs, its index along
    the rows of x, its first chunk, and the end of its chunks, at most `end`.

    Called once per tile, because the divisions take as long as a chunk's products."""
    place = position // chunks
    nt, mt = _where(_tile(place, SHARED), m_tiles, n_tiles)
    start = place * chunks
    return nt, mt, start, gl.minimum(end, start + chunks)


@gluon.jit
def _ask_weights(
    desc, bar, tiles, stage, nt, k, GLU: gl.constexpr
):  # fmt: skip
    TILE: gl.constexpr = CONSUMERS * ROWS
    if GLU:
        blocks = reinterpret(
            tiles, tiles.dtype, [tiles.shape[0], TILE // 16, 2, 8, INPUTS],
            gl.NVMMASharedLayout(128, 8, 4),
        )  # fmt: skip
        at = [nt * (TILE // 16), 0, 0, k]
        load_box(desc, at, bar.index(stage), blocks.index(stage))
    else:
        at = [nt * TILE, k]
        load_box(desc, at, bar.index(stage), tiles.index(stage))


@gluon.jit
def _ask_inputs(x_desc, s_desc, bar, x_tiles, s_tiles, stage, mt, chunk, BN: gl.constexpr):
    at = bar.index(stage)
    k = chunk * INPUTS
    load_box(x_desc, [mt * BN, k], at, x_tiles.index(stage))
    load_box(s_desc, [chunk, mt * BN], at, s_tiles.index(stage))


@gluon.jit
def _produce(
    x_desc, s_desc, w_desc, x_tiles, s_tiles, w_tiles, full, empty, m_tiles, n_tiles, chunks, total,
    BN: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr,
    GLU: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Copies the operands of the program's chunks as soon as the ring has room."""
    BYTES: gl.constexpr = (BN + CONSUMERS * ROWS) * INPUTS + BN * 4
    begin, end = _run(chunks, total, SHARED)
    # Weights do not depend on the predecessor.
    first = gl.minimum(end, begin + STAGES)
    position = begin
    while position < first:
        nt, _, start, until = _span(position, first, chunks, m_tiles, n_tiles, SHARED)
        for i in range(position, until):
            mbarrier.expect(full.index(i - begin), BYTES)
            _ask_weights(w_desc, full, w_tiles, i - begin, nt, (i - start) * INPUTS, GLU)
        position = until
    if PDL:
        wait_for_predecessor()
    position = begin
    while position < first:
        _, mt, start, until = _span(position, first, chunks, m_tiles, n_tiles, SHARED)
        for i in range(position, until):
            _ask_inputs(x_desc, s_desc, full, x_tiles, s_tiles, i - begin, mt, i - start, BN)
        position = until
    while position < end:
        nt, mt, start, until = _span(position, end, chunks, m_tiles, n_tiles, SHARED)
        for i in range(position, until):
            stage = (i - begin) % STAGES
            mbarrier.wait(empty.index(stage), ((i - begin) // STAGES + 1) & 1)
            mbarrier.expect(full.index(stage), BYTES)
            _ask_weights(w_desc, full, w_tiles, stage, nt, (i - start) * INPUTS, GLU)
            _ask_inputs(x_desc, s_desc, full, x_tiles, s_tiles, stage, mt, i - start, BN)
        position = until


@gluon.jit
def _store(y, col, N, mt, M, y_ptr, stride_ym, res_ptr, stride_rm, RES: gl.constexpr):
    """Stores y [outputs, rows of x] at outputs from `col` on. y goes through shared memory, so that
    a thread then has neighbouring outputs of a row."""
    OUTPUTS: gl.constexpr = y.shape[0]
    BN: gl.constexpr = y.shape[1]
    layout: gl.constexpr = _lines(OUTPUTS)
    kind: gl.constexpr = y_ptr.dtype.element_ty
    cols = col + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, layout))
    ms = mt * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    mask = (ms < M)[:, None] & (cols < N)[None, :]
    m64 = ms.to(gl.int64)[:, None]
    if RES:
        # The residual is added in fp32, so that the result is rounded only once.
        added = gl.load(res_ptr + (m64 * stride_rm + cols[None, :]), mask=mask, other=0.0)
        z = gl.convert_layout(gl.permute(y, (1, 0)), layout)
        z = (z + added.to(gl.float32)).to(kind)
    else:
        z = gl.convert_layout(gl.permute(y.to(kind), (1, 0)), layout)
    gl.store(y_ptr + (m64 * stride_ym + cols[None, :]), z, mask=mask)


@gluon.jit
def _finish(
    sums, row, mt, pointers, sizes, strides, GLU: gl.constexpr, ACT: gl.constexpr,
    BIAS: gl.constexpr, RES: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Computes the epilogue of weight rows from `row` on: bias, activation, residual and store."""
    bias_ptr, res_ptr, y_ptr = pointers
    M, N = sizes
    _, stride_rm, stride_ym = strides
    if BIAS:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums.type.layout))
        rows = stored_rows(rows, N, GLU)
        sums = sums + gl.load(bias_ptr + rows).to(gl.float32)[:, None]
    if GLU:
        gate, up = halves(sums, BN)
        z = activate(gate, ACT) * up
        _store(z, row // 2, N, mt, M, y_ptr, stride_ym, res_ptr, stride_rm, RES)
    else:
        z = activate(sums, ACT)
        _store(z, row, N, mt, M, y_ptr, stride_ym, res_ptr, stride_rm, RES)


@gluon.jit
def _multiply(x_tiles, w_tiles, full, chunk, product, STAGES: gl.constexpr, WHICH: gl.constexpr):
    """Starts the product of a chunk, as soon as the chunk has arrived."""
    stage = chunk % STAGES
    mbarrier.wait(full.index(stage), chunk // STAGES & 1)
    x = x_tiles.index(stage).permute((1, 0))
    w = w_tiles.index(stage * CONSUMERS + WHICH)
    return warpgroup_mma(w, x, product, use_acc=False, is_async=True)


@gluon.jit
def _add(sums, product, scales, s_tiles, empty, chunk, STAGES: gl.constexpr):
    """Returns `sums` plus a finished product times its scales, and releases the product's stage."""
    stage = chunk % STAGES
    columns = s_tiles.index(stage).load(gl.SliceLayout(0, sums.type.layout))
    mbarrier.arrive(empty.index(stage), count=1)
    return sums + product * (scales[:, None] * columns[None, :])


@gluon.jit
def _consume(
    x_tiles, s_tiles, w_tiles, full, empty, w_scale_ptr, pointers, parts, sizes, steps, strides,
    BN: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr, GLU: gl.constexpr,
    ACT: gl.constexpr, BIAS: gl.constexpr, RES: gl.constexpr, PDL: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Multiplies a warpgroup's ROWS weight rows of the program's tiles."""
    layout: gl.constexpr = product_layout(BN)
    parts_ptr, counters_ptr = parts
    m_tiles, n_tiles, chunks, total = steps
    _, N = sizes
    begin, end = _run(chunks, total, SHARED)
    if PDL:
        wait_for_predecessor()
    position = begin
    while position < end:
        nt, mt, start, until = _span(position, end, chunks, m_tiles, n_tiles, SHARED)
        row = (nt * CONSUMERS + WHICH) * ROWS
        rows = stored_rows(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), N, GLU)
        scales = w_scale_ptr + rows * strides[0] - start
        sums = gl.zeros([ROWS, BN], gl.float32, layout)
        # A round has two chunks, and no product is in flight between rounds. Otherwise the
        # assembler would wait for each single instruction. If the number of chunks is odd,
        # the first one is computed before the rounds.
        if (until - position) % 2 == 1:
            own = gl.load(scales + position)
            chunk = position - begin
            a = _multiply(x_tiles, w_tiles, full, chunk, sums, STAGES, WHICH)
            a = warpgroup_mma_wait(0, deps=[a])
            sums = _add(sums, a, own, s_tiles, empty, chunk, STAGES)
            position += 1
        last = until - 1
        next_a = gl.load(scales + gl.minimum(position, last))
        next_b = gl.load(scales + gl.minimum(position + 1, last))
        for i in range(position, until, 2):
            chunk = i - begin
            a = _multiply(x_tiles, w_tiles, full, chunk, sums, STAGES, WHICH)
            b = _multiply(x_tiles, w_tiles, full, chunk + 1, sums, STAGES, WHICH)
            own_a = next_a
            own_b = next_b
            next_a = gl.load(scales + gl.minimum(i + 2, last))
            next_b = gl.load(scales + gl.minimum(i + 3, last))
            a = warpgroup_mma_wait(1, deps=[a])
            sums = _add(sums, a, own_a, s_tiles, empty, chunk, STAGES)
            b = warpgroup_mma_wait(0, deps=[b])
            sums = _add(sums, b, own_b, s_tiles, empty, chunk + 1, STAGES)
        if SHARED:
            sums = gl.convert_layout(sums, sums_layout(BN), assert_trivial=True)
            sums, whole = reduce_split_k(
                sums, start // chunks, chunks, total, parts_ptr, counters_ptr, CONSUMERS, BN, WHICH
            )
            if whole:
                _finish(sums, row, mt, pointers, sizes, strides, GLU, ACT, BIAS, RES, BN)
        else:
            _finish(sums, row, mt, pointers, sizes, strides, GLU, ACT, BIAS, RES, BN)
        position = until


SIZES = ["M", "m_tiles", "n_tiles", "chunks", "total", "stride_sn"]
"""Arguments whose values do not cause further compilations."""


@gluon.jit(do_not_specialize=SIZES)
def multiply_blocks(
    x_desc, s_desc, w_desc, w_scale_ptr, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr,
    M, N, m_tiles, n_tiles, chunks, total, stride_sn, stride_rm, stride_ym,
    BN: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr,
    GLU: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr, RES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of x [M, K] and w [N, K] (gated: [2 N, K]).

    A tile is ROWS weight rows for each of CONSUMERS warpgroups, by BN rows of x.

    Args:
        s_desc: scales of x, [K / 128, M].
        w_desc: weight rows. In a gated layer it is [N / 8, gate or up, 8, K].
        w_scale_ptr: [outputs, K / 128].
        total: number of chunks of all tiles.
        SHARED: programs share tiles.
    """
    kind: gl.constexpr = x_desc.dtype
    TILE: gl.constexpr = CONSUMERS * ROWS
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    x_tiles = gl.allocate_shared_memory(kind, [STAGES, BN, INPUTS], layout)
    w_tiles = gl.allocate_shared_memory(kind, [STAGES, TILE, INPUTS], layout)
    w_shares = reinterpret(w_tiles, kind, [STAGES * CONSUMERS, ROWS, INPUTS], layout)
    s_boxes = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BN], gl.NVMMASharedLayout(0, 32, 2))
    s_tiles = reinterpret(s_boxes, gl.float32, [STAGES, BN], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    barrier()
    if PDL:
        release_successor()
    steps = (m_tiles, n_tiles, chunks, total)
    work = (
        x_tiles, s_tiles, w_shares, full, empty, w_scale_ptr, (bias_ptr, res_ptr, y_ptr),
        (parts_ptr, counters_ptr), (M, N), steps, (stride_sn, stride_rm, stride_ym),
    )  # fmt: skip
    copies = (
        x_desc, s_desc, w_desc, x_tiles, s_boxes, w_tiles, full, empty, m_tiles, n_tiles, chunks,
        total,
    )  # fmt: skip
    copying: gl.constexpr = (BN, STAGES, SHARED, GLU, PDL)
    first: gl.constexpr = (BN, STAGES, SHARED, GLU, ACT, BIAS, RES, PDL, 0)
    second: gl.constexpr = (BN, STAGES, SHARED, GLU, ACT, BIAS, RES, PDL, 1)
    # The copying warp passes registers that it does not need to the other warps.
    gl.warp_specialize(
        [
            (_consume, concat(work, first)), (_consume, concat(work, second)),
            (_produce, concat(copies, copying)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
