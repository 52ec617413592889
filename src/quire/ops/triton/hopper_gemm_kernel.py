"""The kernel of `hopper_gemm.py`: weights of 4 bits by wgmma, whose left operand they are.

A tile is some weight rows by BN rows of x. One warp copies words of weights and inputs by TMA to a
ring in shared memory, ahead of two or four warpgroups that share the weight rows. A thread reads
from there the words that hold its part of the left operand, and unpacks them into registers where
the instruction takes them. Of four warpgroups some unpack while others multiply; each of two also
unpacks what comes next while the tensor cores multiply. The right operand are inputs in the order
that makes this so, see `order_inputs`. Of a gated layer, a tile's weight rows are 8 gate rows,
their 8 up rows, and so on, so that a thread has sums of both.

Programs share all tiles' inputs evenly: each has a run of chunks, which may begin and end within a
tile. The sums of a tile's programs meet in a workspace, and the last to arrive adds them in order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.ops.triton.hopper_common import release_successor, sums_layout, wait_for_predecessor

ROWS = gl.constexpr(64)
"""Weight rows of a product of a warpgroup."""
WORDS = gl.constexpr(16)
"""Words of 32 bits of a weight row, or 128 inputs: a chunk."""
INPUTS = gl.constexpr(128)


@gluon.constexpr_function
def _words_layout() -> gl.DistributedLinearLayout:
    """Each thread has four neighbouring words of two rows, those of its part of the operand."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 16],
    )


@gluon.jit
def _words(tiles, stage, CONSUMERS: gl.constexpr, WHICH: gl.constexpr):
    """Returns a warpgroup's words of a stage."""
    return tiles.index(stage * CONSUMERS + WHICH).load(_words_layout())


@gluon.jit
def _unpack(words, numbers, ASM: gl.constexpr, BN: gl.constexpr):
    """Returns weights [ROWS, INPUTS] as left operand."""
    z, words = gl.broadcast(numbers[0][:, None], words)
    s, words = gl.broadcast(numbers[1][:, None], words)
    kind = s.dtype
    v0, v1, v2, v3, v4, v5, v6, v7 = gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [words, s, z],
        dtype=(kind, kind, kind, kind, kind, kind, kind, kind), is_pure=True, pack=2,
    )  # fmt: skip
    low = gl.join(gl.join(v0, v1), gl.join(v2, v3))
    high = gl.join(gl.join(v4, v5), gl.join(v6, v7))
    # Axes: row, thread of four, pair of words, word of the pair, place's bits from the lowest on.
    x = gl.reshape(gl.join(low, high), [ROWS, 4, 2, 2, 2, 2, 2])
    x = gl.reshape(gl.permute(x, (0, 2, 6, 5, 4, 1, 3)), [ROWS, INPUTS])
    layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout(BN), 2)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _owner(position, total, programs):
    """Returns the program whose run has a position."""
    return (((position + 1).to(gl.int64) * programs - 1) // total).to(gl.int32)


@gluon.jit
def begin_of(program, total, programs):
    """Returns where a program's run begins."""
    return (program.to(gl.int64) * total // programs).to(gl.int32)


@gluon.jit
def _first_row(nt, CONSUMERS: gl.constexpr, WHICH: gl.constexpr):
    """Returns the first of a warpgroup's weight rows, as tiles order them."""
    return (nt * CONSUMERS + WHICH) * ROWS


@gluon.jit
def stored_rows(rows, N, GLU: gl.constexpr):
    """Returns where rows of tiles are stored; rows behind the last stand for it."""
    if GLU:
        rows = gl.minimum(rows // 16 * 8 + rows % 8, N - 1) + rows // 8 % 2 * N
    else:
        rows = gl.minimum(rows, N - 1)
    return rows


@gluon.jit
def _weight_rows(row, N, GLU: gl.constexpr):
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _words_layout()))
    return stored_rows(rows, N, GLU)


@gluon.jit
def _ask_weights(
    desc, bar, tiles, stage, position, chunks, m_tiles, CONSUMERS: gl.constexpr, GLU: gl.constexpr
):  # fmt: skip
    row = _first_row(position // chunks // m_tiles, CONSUMERS, 0)
    word = position % chunks * WORDS
    BLOCKS: gl.constexpr = CONSUMERS * ROWS // 16
    if GLU:
        blocks = tiles._reinterpret(
            gl.int32, [tiles.shape[0], BLOCKS, 2, 8, WORDS], gl.NVMMASharedLayout(64, 32, 4)
        )
        tma.async_copy_global_to_shared(
            desc, [row // 16, 0, 0, word], bar.index(stage), blocks.index(stage)
        )
    else:
        tma.async_copy_global_to_shared(desc, [row, word], bar.index(stage), tiles.index(stage))


@gluon.jit
def _ask_inputs(desc, bar, tiles, stage, position, chunks, m_tiles, BN: gl.constexpr):
    row = position // chunks % m_tiles * BN
    chunk = position % chunks
    tma.async_copy_global_to_shared(
        desc, [row, chunk * INPUTS], bar.index(stage), tiles.index(stage)
    )


@gluon.jit
def _produce(
    x_desc, w_desc, x_tiles, w_tiles, full, empty, m_tiles, chunks, total,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GLU: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Copies what the program's chunks take, as soon as there is room."""
    BYTES: gl.constexpr = BN * INPUTS * 2 + CONSUMERS * ROWS * WORDS * 4
    programs = gl.num_programs(0)
    begin = begin_of(gl.program_id(0), total, programs)
    end = begin_of(gl.program_id(0) + 1, total, programs)
    # Weights do not depend on the predecessor.
    first = gl.minimum(end, begin + STAGES)
    for i in range(begin, first):
        mbarrier.expect(full.index(i - begin), BYTES)
        _ask_weights(w_desc, full, w_tiles, i - begin, i, chunks, m_tiles, CONSUMERS, GLU)
    if PDL:
        wait_for_predecessor()
    for i in range(begin, first):
        _ask_inputs(x_desc, full, x_tiles, i - begin, i, chunks, m_tiles, BN)
    for i in range(first, end):
        stage = (i - begin) % STAGES
        mbarrier.wait(empty.index(stage), ((i - begin) // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), BYTES)
        _ask_weights(w_desc, full, w_tiles, stage, i, chunks, m_tiles, CONSUMERS, GLU)
        _ask_inputs(x_desc, full, x_tiles, stage, i, chunks, m_tiles, BN)


@gluon.jit
def _slot(program, behind, CONSUMERS: gl.constexpr, WHICH: gl.constexpr):
    """Returns where a warpgroup's sums of a tile go: of the program's first, or that behind it."""
    return (2 * program + behind) * CONSUMERS + WHICH


@gluon.jit
def _at(ptr, slot, BN: gl.constexpr):
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums_layout(BN)))
    cols = gl.arange(0, BN, layout=gl.SliceLayout(0, sums_layout(BN)))
    return ptr + slot.to(gl.int64) * (ROWS * BN) + (rows[:, None] * BN + cols[None, :])


@gluon.jit
def _load_sums(ptr, slot, wanted, BN: gl.constexpr):
    """Returns a warpgroup's sums, zeros unless `wanted`. Reads past L1, which does not see what
    other programs wrote."""
    return gl.load(_at(ptr, slot, BN), mask=wanted, other=0.0, cache_modifier=".cg")


@gluon.jit
def meet(
    sums, tile, chunks, total, parts_ptr, counters_ptr, CONSUMERS: gl.constexpr, BN: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Returns the sums of all of a tile's programs, and whether this is the last one to come: the
    others' are not whole."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    first = _owner(tile * chunks, total, programs)
    count = _owner((tile + 1) * chunks - 1, total, programs) - first + 1
    whole = count == 1
    if count > 1:
        behind = begin_of(program, total, programs) // chunks != tile
        gl.store(_at(parts_ptr, _slot(program, behind, CONSUMERS, WHICH), BN), sums)
        gl.thread_barrier()  # all are written before the one atomic that says so
        counter_ptr = counters_ptr + first * CONSUMERS + WHICH
        whole = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
        if whole:
            behind = begin_of(first, total, programs) // chunks != tile
            # Where registers suffice, two at a time: a load takes longer than all sums.
            PAIRS: gl.constexpr = CONSUMERS == 2 or BN <= 32
            sums = _load_sums(parts_ptr, _slot(first, behind, CONSUMERS, WHICH), True, BN)
            for other in range(first + 1, first + count, 2 if PAIRS else 1):
                more = _load_sums(parts_ptr, _slot(other, False, CONSUMERS, WHICH), True, BN)
                if PAIRS:
                    slot = _slot(other + 1, False, CONSUMERS, WHICH)
                    last = _load_sums(parts_ptr, slot, other + 1 < first + count, BN)
                    sums = sums + more + last
                else:
                    sums += more
            gl.store(counter_ptr, 0)
    return sums, whole


@gluon.jit
def activate(x, ACT: gl.constexpr):
    """See `activation.activate`."""
    if ACT == "silu":
        x = x / (1.0 + gl.exp(-x))
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        x = x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return x


@gluon.jit
def _ended(
    sums, row, N, out_scale_ptr, bias_ptr, SCALED: gl.constexpr, BIAS: gl.constexpr,
    GLU: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """Returns sums of weight rows from `row` on with scales of outputs and biases."""
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums_layout(BN)))
    rows = stored_rows(rows, N, GLU)
    if SCALED:
        sums = sums * gl.load(out_scale_ptr + rows).to(gl.float32)[:, None]
    if BIAS:
        sums = sums + gl.load(bias_ptr + rows).to(gl.float32)[:, None]
    return sums


@gluon.jit
def halves(sums, BN: gl.constexpr):
    """Returns the sums of gate rows and of up rows, [ROWS / 2, BN]."""
    x = gl.permute(gl.reshape(sums, [ROWS // 16, 2, 8, BN]), (0, 2, 3, 1))
    gate, up = gl.split(x)
    return gl.reshape(gate, [ROWS // 2, BN]), gl.reshape(up, [ROWS // 2, BN])


@gluon.jit
def _store(y, col, end, mt, M, y_ptr, stride_ym, res_ptr, stride_rm, RES: gl.constexpr):
    """Stores y [outputs, rows of x] at outputs from `col` on, up to `end`."""
    layout: gl.constexpr = y.type.layout
    cols = col + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, layout))
    ms = mt * y.shape[1] + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, layout))
    mask = (cols < end)[:, None] & (ms < M)[None, :]
    m64 = ms.to(gl.int64)[None, :]
    if RES:
        added = gl.load(res_ptr + (m64 * stride_rm + cols[:, None]), mask=mask, other=0.0)
        y = y + added.to(gl.float32)
    gl.store(y_ptr + (m64 * stride_ym + cols[:, None]), y.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _finish(
    sums, nt, mt, pointers, sizes, strides, CONSUMERS: gl.constexpr, BN: gl.constexpr,
    SCALED: gl.constexpr, GLU: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
    RES: gl.constexpr, APART: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Ends a tile of sums and stores it: scales of outputs, bias, activation and residual."""
    scale_ptr, _, bias_ptr, res_ptr, y_ptr, _, _ = pointers
    M, N, _, _, _ = sizes
    _, stride_rm, stride_ym = strides
    row = _first_row(nt, CONSUMERS, WHICH)
    y = _ended(sums, row, N, scale_ptr, bias_ptr, SCALED, BIAS, GLU, BN)
    if GLU:
        gate, up = halves(y, BN)
        if APART:
            _store(gate, row // 2, N, mt, M, y_ptr, stride_ym, res_ptr, stride_rm, False)
            _store(up, row // 2, N, mt, M, y_ptr + N, stride_ym, res_ptr, stride_rm, False)
        else:
            z = activate(gate, ACT) * up
            _store(z, row // 2, N, mt, M, y_ptr, stride_ym, res_ptr, stride_rm, RES)
    else:
        z = activate(y, ACT)
        _store(z, row, N, mt, M, y_ptr, stride_ym, res_ptr, stride_rm, RES)


@gluon.jit
def _numbers(
    scales, rows, position, start, until, GROUP: gl.constexpr, ZEROS: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """Returns of rows [ROWS], at a chunk or the tile's last, what is added to unpacked bits and
    then the factor."""
    BASE: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    scale_ptr, zero_ptr, stride = scales
    minus = gl.full([ROWS], -BASE - 8.0, dtype, rows.type.layout)
    factor = gl.full([ROWS], 1.0, dtype, rows.type.layout)
    if GROUP > 0:
        at = rows * stride + (gl.minimum(position, until - 1) - start) // GROUP
        factor = gl.load(scale_ptr + at).to(dtype)
        if ZEROS:
            minus = (-BASE - gl.load(zero_ptr + at).to(gl.float32)).to(dtype)
    return minus, factor


@gluon.jit
def _consume(
    x_tiles, w_tiles, full, empty, pointers, sizes, strides,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ASM: gl.constexpr, ZEROS: gl.constexpr, SCALED: gl.constexpr, GLU: gl.constexpr,
    ACT: gl.constexpr, BIAS: gl.constexpr, RES: gl.constexpr, APART: gl.constexpr,
    PDL: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Multiplies a warpgroup's ROWS weight rows of the program's tiles."""
    AHEAD: gl.constexpr = CONSUMERS == 2
    scale_ptr, zero_ptr, _, _, _, parts_ptr, counters_ptr = pointers
    scales = (scale_ptr, zero_ptr, strides[0])
    _, N, m_tiles, chunks, total = sizes
    dtype: gl.constexpr = x_tiles.dtype
    begin = begin_of(gl.program_id(0), total, gl.num_programs(0))
    end = begin_of(gl.program_id(0) + 1, total, gl.num_programs(0))
    if PDL:
        wait_for_predecessor()
    position = begin
    while position < end:
        tile = position // chunks
        nt = tile // m_tiles
        until = gl.minimum(end, (tile + 1) * chunks)
        start = tile * chunks
        rows = _weight_rows(_first_row(nt, CONSUMERS, WHICH), N, GLU)
        numbers = _numbers(scales, rows, position, start, until, GROUP, ZEROS, dtype)
        ahead = _numbers(scales, rows, position + 1, start, until, GROUP, ZEROS, dtype)
        acc = gl.zeros([ROWS, BN], gl.float32, sums_layout(BN))
        chunk = position - begin
        if AHEAD:
            mbarrier.wait(full.index(chunk % STAGES), chunk // STAGES & 1)
            words = _words(w_tiles, chunk % STAGES, CONSUMERS, WHICH)
            a = _unpack(words, numbers, ASM, BN)
            chunk += 1
            following = full.index(chunk % STAGES)
            mbarrier.wait(following, chunk // STAGES & 1, pred=chunk < end - begin)
            words = _words(w_tiles, chunk % STAGES, CONSUMERS, WHICH)
        for i in range(position, until):
            stage = (i - begin) % STAGES
            x = x_tiles.index(stage).permute((1, 0))
            if AHEAD:
                # No product is under way from one round to the next: the assembler would wait for
                # each single one. It moves arithmetic across the waits for products, but not across
                # loops: the wait for a copy keeps unpacking before it.
                acc = warpgroup_mma(a, x, acc, is_async=True)
                a = _unpack(words, ahead, ASM, BN)
                ahead = _numbers(scales, rows, i + 2, start, until, GROUP, ZEROS, dtype)
                chunk = i + 2 - begin
                following = full.index(chunk % STAGES)
                mbarrier.wait(following, chunk // STAGES & 1, pred=i + 2 < end)
                words = _words(w_tiles, chunk % STAGES, CONSUMERS, WHICH)
            else:
                mbarrier.wait(full.index(stage), (i - begin) // STAGES & 1)
                words = _words(w_tiles, stage, CONSUMERS, WHICH)
                a = _unpack(words, numbers, ASM, BN)
                numbers = ahead
                ahead = _numbers(scales, rows, i + 2, start, until, GROUP, ZEROS, dtype)
                acc = warpgroup_mma(a, x, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage), count=1)
        sums, whole = meet(acc, tile, chunks, total, parts_ptr, counters_ptr, CONSUMERS, BN, WHICH)
        if whole:
            _finish(
                sums, nt, tile % m_tiles, pointers, sizes, strides, CONSUMERS, BN, SCALED, GLU, ACT,
                BIAS, RES, APART, WHICH,
            )  # fmt: skip
        position = until


SIZES = ["M", "N", "m_tiles", "chunks", "total", "stride_sn", "stride_rm", "stride_ym"]
"""One compilation for all of them."""


@gluon.jit(do_not_specialize=SIZES)
def multiply_chunks(
    x_desc, w_desc, scale_ptr, zero_ptr, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr,
    M, N, m_tiles, chunks, total, stride_sn, stride_rm, stride_ym,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ASM: gl.constexpr, ZEROS: gl.constexpr, SCALED: gl.constexpr, GLU: gl.constexpr,
    ACT: gl.constexpr, BIAS: gl.constexpr, RES: gl.constexpr, APART: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of x [M, K] and w [N, K] (gated: [2 N, K]). A tile is ROWS weight rows for
    each of CONSUMERS warpgroups, and BN rows of x. GROUP: chunks of a group; 0: each output has one
    scale, if SCALED. total: chunks of all tiles. w_desc: words of rows; of a gated layer, [N / 8,
    gate or up, 8, words]."""
    dtype: gl.constexpr = x_desc.dtype
    x_tiles = gl.allocate_shared_memory(
        dtype, [STAGES, BN, INPUTS], gl.NVMMASharedLayout(128, 16, 2)
    )
    layout: gl.constexpr = gl.NVMMASharedLayout(64, 32, 2)
    w_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, CONSUMERS * ROWS, WORDS], layout)
    w_shares = w_tiles._reinterpret(gl.int32, [STAGES * CONSUMERS, ROWS, WORDS], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    if PDL:
        release_successor()
    work = (
        x_tiles, w_shares, full, empty,
        (scale_ptr, zero_ptr, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr),
        (M, N, m_tiles, chunks, total), (stride_sn, stride_rm, stride_ym),
    )  # fmt: skip
    copies = (x_desc, w_desc, x_tiles, w_tiles, full, empty, m_tiles, chunks, total)
    copying: gl.constexpr = (CONSUMERS, BN, STAGES, GLU, PDL)
    w0: gl.constexpr = (
        CONSUMERS, BN, STAGES, GROUP, ASM, ZEROS, SCALED, GLU, ACT, BIAS, RES, APART, PDL,
        0,
    )  # fmt: skip
    w1: gl.constexpr = (
        CONSUMERS, BN, STAGES, GROUP, ASM, ZEROS, SCALED, GLU, ACT, BIAS, RES, APART, PDL,
        1,
    )  # fmt: skip
    w2: gl.constexpr = (
        CONSUMERS, BN, STAGES, GROUP, ASM, ZEROS, SCALED, GLU, ACT, BIAS, RES, APART, PDL,
        2,
    )  # fmt: skip
    w3: gl.constexpr = (
        CONSUMERS, BN, STAGES, GROUP, ASM, ZEROS, SCALED, GLU, ACT, BIAS, RES, APART, PDL,
        3,
    )  # fmt: skip
    # What the copying warp does not need of the registers goes to the others.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, work + w0), (_consume, work + w1), (_produce, copies + copying)],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, work + w0), (_consume, work + w1), (_consume, work + w2),
                (_consume, work + w3), (_produce, copies + copying),
            ],
            [4, 4, 4, 1], [120, 120, 120, 24],
        )  # fmt: skip
