"""The kernel of `hopper_gemm.py`: weights of 4 bits by wgmma, whose left operand they are.

A tile is 128 weight rows, or twice as many, by BN rows of x. One warp copies words of weights and
inputs by TMA to a ring in shared memory, ahead of two warpgroups that have half of the weight rows
each. A thread reads from there the words that hold its part of the left operand, and unpacks them
into registers where the instruction takes them, while the tensor cores multiply what it unpacked
before. The right operand are inputs in the order that makes this so, see `order_inputs`.

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

ROWS = gl.constexpr(64)
"""Weight rows of a product of a warpgroup."""
CONSUMERS = gl.constexpr(2)
WORDS = gl.constexpr(16)
"""Words of 32 bits of a weight row, or 128 inputs: a chunk."""
INPUTS = gl.constexpr(128)


@gluon.constexpr_function
def sums_layout(columns: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


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
def _words(tiles, stage, part, which, PARTS: gl.constexpr):
    """Returns a warpgroup's words of a part of a stage."""
    return tiles.index((stage * PARTS + part) * CONSUMERS + which).load(_words_layout())


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
def _first_row(nt, N, which, part, PARTS: gl.constexpr, GLU: gl.constexpr):
    """Returns the first of a warpgroup's weight rows. Parts are gate and up, or neighbours."""
    BOTH: gl.constexpr = CONSUMERS * ROWS
    start = nt * BOTH + part * N if GLU else (nt * PARTS + part) * BOTH
    return start + which * ROWS


@gluon.jit
def _weight_rows(row, last_row):
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, _words_layout()))
    return gl.minimum(rows, last_row)


@gluon.jit
def _ask_weights(
    desc, bar, tiles, stage, position, chunks, m_tiles, N, PARTS: gl.constexpr, GLU: gl.constexpr
):  # fmt: skip
    row = _first_row(position // chunks // m_tiles, N, 0, 0, PARTS, GLU)
    chunk = position % chunks
    for part in gl.static_range(PARTS):
        at = row + part * (N if GLU else CONSUMERS * ROWS)
        tma.async_copy_global_to_shared(
            desc, [at, chunk * WORDS], bar.index(stage), tiles.index(stage * PARTS + part)
        )


@gluon.jit
def _ask_inputs(desc, bar, tiles, stage, position, chunks, m_tiles, BN: gl.constexpr):
    row = position // chunks % m_tiles * BN
    chunk = position % chunks
    tma.async_copy_global_to_shared(
        desc, [row, chunk * INPUTS], bar.index(stage), tiles.index(stage)
    )


@gluon.jit
def _wait_for_predecessor():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _produce(
    x_desc, w_desc, x_tiles, w_tiles, full, empty, N, m_tiles, chunks, total,
    PARTS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GLU: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = BN * INPUTS * 2 + PARTS * CONSUMERS * ROWS * WORDS * 4
    programs = gl.num_programs(0)
    begin = _begin(gl.program_id(0), total, programs)
    end = _begin(gl.program_id(0) + 1, total, programs)
    # Weights do not depend on the predecessor.
    first = gl.minimum(end, begin + STAGES)
    for i in range(begin, first):
        mbarrier.expect(full.index(i - begin), BYTES)
        _ask_weights(w_desc, full, w_tiles, i - begin, i, chunks, m_tiles, N, PARTS, GLU)
    if PDL:
        _wait_for_predecessor()
    for i in range(begin, first):
        _ask_inputs(x_desc, full, x_tiles, i - begin, i, chunks, m_tiles, BN)
    for i in range(first, end):
        stage = (i - begin) % STAGES
        mbarrier.wait(empty.index(stage), ((i - begin) // STAGES + 1) & 1)
        mbarrier.expect(full.index(stage), BYTES)
        _ask_weights(w_desc, full, w_tiles, stage, i, chunks, m_tiles, N, PARTS, GLU)
        _ask_inputs(x_desc, full, x_tiles, stage, i, chunks, m_tiles, BN)


@gluon.jit
def _activate(x, ACT: gl.constexpr):
    """See `activation.activate`."""
    if ACT == "silu":
        x = x / (1.0 + gl.exp(-x))
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        x = x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return x


@gluon.jit
def _ended(acc, row, out_scale_ptr, bias_ptr, last_row, SCALED: gl.constexpr, BIAS: gl.constexpr,
           BN: gl.constexpr):  # fmt: skip
    """Returns sums of weight rows from `row` on with scales of outputs and biases."""
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums_layout(BN)))
    rows = gl.minimum(rows, last_row)
    if SCALED:
        acc = acc * gl.load(out_scale_ptr + rows).to(gl.float32)[:, None]
    if BIAS:
        acc = acc + gl.load(bias_ptr + rows).to(gl.float32)[:, None]
    return acc


@gluon.jit
def _store(y, col, cols_end, mt, M, y_ptr, stride_ym, res_ptr, stride_rm, RES: gl.constexpr,
           BN: gl.constexpr):  # fmt: skip
    cols = col + gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums_layout(BN)))
    ms = mt * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, sums_layout(BN)))
    mask = (cols < cols_end)[:, None] & (ms < M)[None, :]
    m64 = ms.to(gl.int64)[None, :]
    if RES:
        added = gl.load(res_ptr + (m64 * stride_rm + cols[:, None]), mask=mask, other=0.0)
        y = y + added.to(gl.float32)
    gl.store(y_ptr + (m64 * stride_ym + cols[:, None]), y.to(y_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _owner(position, total, programs):
    """Returns the program whose run has a position."""
    return (((position + 1).to(gl.int64) * programs - 1) // total).to(gl.int32)


@gluon.jit
def _begin(program, total, programs):
    return (program.to(gl.int64) * total // programs).to(gl.int32)


@gluon.jit
def _slot(program, which, behind):
    """Returns where a warpgroup's sums of a tile go: of the program's first, or that behind it."""
    return (2 * program + behind) * CONSUMERS + which


@gluon.jit
def _at(ptr, slot, part, PARTS: gl.constexpr, BN: gl.constexpr):
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums_layout(BN)))
    cols = gl.arange(0, BN, layout=gl.SliceLayout(0, sums_layout(BN)))
    start = ptr + (slot * PARTS + part).to(gl.int64) * (ROWS * BN)
    return start + (rows[:, None] * BN + cols[None, :])


@gluon.jit
def _load_sums(ptr, slot, PARTS: gl.constexpr, BN: gl.constexpr):
    """Reads past L1, which does not see what other programs wrote."""
    sums = ()
    for part in gl.static_range(PARTS):
        sums = sums + (gl.load(_at(ptr, slot, part, PARTS, BN), cache_modifier=".cg"),)
    return sums


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
def _meet(
    sums, tile, chunks, total, parts_ptr, counters_ptr, PARTS: gl.constexpr, BN: gl.constexpr,
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
        behind = _begin(program, total, programs) // chunks != tile
        for part in gl.static_range(PARTS):
            gl.store(_at(parts_ptr, _slot(program, WHICH, behind), part, PARTS, BN), sums[part])
        gl.thread_barrier()  # all are written before the one atomic that says so
        counter_ptr = counters_ptr + first * CONSUMERS + WHICH
        whole = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
        if whole:
            behind = _begin(first, total, programs) // chunks != tile
            slot = _slot(first, WHICH, behind)
            sums = _load_sums(parts_ptr, slot, PARTS, BN)
            for other in range(first + 1, first + count):
                more = _load_sums(parts_ptr, _slot(other, WHICH, False), PARTS, BN)
                if PARTS == 2:
                    sums = (sums[0] + more[0], sums[1] + more[1])
                else:
                    sums = (sums[0] + more[0],)
            gl.store(counter_ptr, 0)
    return sums, whole


@gluon.jit
def _finish(
    sums, nt, mt, pointers, sizes, strides, PARTS: gl.constexpr, BN: gl.constexpr,
    SCALED: gl.constexpr, GLU: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
    RES: gl.constexpr, APART: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Ends a tile of sums and stores it: scales of outputs, bias, activation and residual."""
    scale_ptr, _, bias_ptr, res_ptr, y_ptr, _, _ = pointers
    M, N, _, _, _ = sizes
    _, stride_rm, stride_ym = strides
    last_row = N * (2 if GLU else 1) - 1
    row = _first_row(nt, N, WHICH, 0, PARTS, GLU)
    y = _ended(sums[0], row, scale_ptr, bias_ptr, last_row, SCALED, BIAS, BN)
    if not (GLU and APART):
        y = _activate(y, ACT)
    if PARTS == 2:
        other = _first_row(nt, N, WHICH, 1, PARTS, GLU)
        z = _ended(sums[1], other, scale_ptr, bias_ptr, last_row, SCALED, BIAS, BN)
        if GLU and not APART:
            y = y * z
        else:
            if not GLU:
                z = _activate(z, ACT)
            end = 2 * N if GLU else N
            _store(z, other, end, mt, M, y_ptr, stride_ym, res_ptr, stride_rm, RES, BN)
    _store(y, row, N, mt, M, y_ptr, stride_ym, res_ptr, stride_rm, RES, BN)


@gluon.jit
def _consume(
    x_tiles, w_tiles, full, empty, pointers, sizes, strides,
    PARTS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ASM: gl.constexpr, ZEROS: gl.constexpr, SCALED: gl.constexpr, GLU: gl.constexpr,
    ACT: gl.constexpr, BIAS: gl.constexpr, RES: gl.constexpr, APART: gl.constexpr,
    PDL: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Multiplies a warpgroup's ROWS weight rows of each part of the program's tiles."""
    scale_ptr, zero_ptr, _, _, _, parts_ptr, counters_ptr = pointers
    scales = (scale_ptr, zero_ptr, strides[0])
    _, N, m_tiles, chunks, total = sizes
    dtype: gl.constexpr = x_tiles.dtype
    layout: gl.constexpr = sums_layout(BN)
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    begin = _begin(program, total, programs)
    end = _begin(program + 1, total, programs)
    last_row = N * (2 if GLU else 1) - 1
    if PDL:
        _wait_for_predecessor()
    position = begin
    while position < end:
        tile = position // chunks
        nt = tile // m_tiles
        mt = tile % m_tiles
        until = gl.minimum(end, (tile + 1) * chunks)
        start = tile * chunks
        rows0 = _weight_rows(_first_row(nt, N, WHICH, 0, PARTS, GLU), last_row)
        numbers0 = _numbers(scales, rows0, position, start, until, GROUP, ZEROS, dtype)
        ahead0 = _numbers(scales, rows0, position + 1, start, until, GROUP, ZEROS, dtype)
        acc0 = gl.zeros([ROWS, BN], gl.float32, layout)
        if PARTS == 2:
            rows1 = _weight_rows(_first_row(nt, N, WHICH, 1, PARTS, GLU), last_row)
            numbers1 = _numbers(scales, rows1, position, start, until, GROUP, ZEROS, dtype)
            acc1 = gl.zeros([ROWS, BN], gl.float32, layout)
        chunk = position - begin
        mbarrier.wait(full.index(chunk % STAGES), chunk // STAGES & 1)
        words = _words(w_tiles, chunk % STAGES, 0, WHICH, PARTS)
        a = _unpack(words, numbers0, ASM, BN)
        if PARTS == 2:
            words = _words(w_tiles, chunk % STAGES, 1, WHICH, PARTS)
        else:
            chunk += 1
            mbarrier.wait(full.index(chunk % STAGES), chunk // STAGES & 1, pred=chunk < end - begin)
            words = _words(w_tiles, chunk % STAGES, 0, WHICH, PARTS)
        for i in range(position, until):
            # No product is under way from one round to the next: the assembler would wait for each
            # single one. It moves arithmetic across the waits for products, but not across loops:
            # waits for copies, one of which ends at once, keep unpacking before them.
            stage = (i - begin) % STAGES
            x = x_tiles.index(stage).permute((1, 0))
            acc0 = warpgroup_mma(a, x, acc0, is_async=True)
            if PARTS == 2:
                b = _unpack(words, numbers1, ASM, BN)
                numbers1 = _numbers(scales, rows1, i + 1, start, until, GROUP, ZEROS, dtype)
                chunk = i + 1 - begin
                following = full.index(chunk % STAGES)
                mbarrier.wait(following, chunk // STAGES & 1, pred=i + 1 < end)
                words = _words(w_tiles, chunk % STAGES, 0, WHICH, PARTS)
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
                acc1 = warpgroup_mma(b, x, acc1, is_async=True)
                a = _unpack(words, ahead0, ASM, BN)
                words = _words(w_tiles, chunk % STAGES, 1, WHICH, PARTS)
                ahead0 = _numbers(scales, rows0, i + 2, start, until, GROUP, ZEROS, dtype)
                mbarrier.wait(following, chunk // STAGES & 1, pred=i + 1 < end)
                acc1 = warpgroup_mma_wait(0, deps=[acc1])
            else:
                a = _unpack(words, ahead0, ASM, BN)
                ahead0 = _numbers(scales, rows0, i + 2, start, until, GROUP, ZEROS, dtype)
                chunk = i + 2 - begin
                following = full.index(chunk % STAGES)
                mbarrier.wait(following, chunk // STAGES & 1, pred=i + 2 < end)
                words = _words(w_tiles, chunk % STAGES, 0, WHICH, PARTS)
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
            mbarrier.arrive(empty.index(stage), count=1)
        sums = (acc0, acc1) if PARTS == 2 else (acc0,)
        sums, whole = _meet(sums, tile, chunks, total, parts_ptr, counters_ptr, PARTS, BN, WHICH)
        if whole:
            _finish(sums, nt, mt, pointers, sizes, strides, PARTS, BN, SCALED, GLU, ACT, BIAS, RES,
                    APART, WHICH)  # fmt: skip
        position = until


SIZES = ["M", "N", "m_tiles", "chunks", "total", "stride_sn", "stride_rm", "stride_ym"]
"""One compilation for all of them."""


@gluon.jit(do_not_specialize=SIZES)
def multiply_chunks(
    x_desc, w_desc, scale_ptr, zero_ptr, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr,
    M, N, m_tiles, chunks, total, stride_sn, stride_rm, stride_ym,
    PARTS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ASM: gl.constexpr, ZEROS: gl.constexpr, SCALED: gl.constexpr, GLU: gl.constexpr,
    ACT: gl.constexpr, BIAS: gl.constexpr, RES: gl.constexpr, APART: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of x [M, K] and w [N, K] (gated: [2 N, K]). GROUP: chunks of a group; 0:
    each output has one scale, if SCALED. total: chunks of all tiles."""
    dtype: gl.constexpr = x_desc.dtype
    BOTH: gl.constexpr = CONSUMERS * ROWS
    x_tiles = gl.allocate_shared_memory(
        dtype, [STAGES, BN, INPUTS], gl.NVMMASharedLayout(128, 16, 2)
    )
    layout: gl.constexpr = gl.NVMMASharedLayout(64, 32, 2)
    w_tiles = gl.allocate_shared_memory(gl.int32, [STAGES * PARTS, BOTH, WORDS], layout)
    w_halves = w_tiles._reinterpret(gl.int32, [STAGES * PARTS * CONSUMERS, ROWS, WORDS], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    work = (
        x_tiles, w_halves, full, empty,
        (scale_ptr, zero_ptr, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr),
        (M, N, m_tiles, chunks, total), (stride_sn, stride_rm, stride_ym),
    )  # fmt: skip
    copies = (x_desc, w_desc, x_tiles, w_tiles, full, empty, N, m_tiles, chunks, total)
    one: gl.constexpr = (
        PARTS,
        BN,
        STAGES,
        GROUP,
        ASM,
        ZEROS,
        SCALED,
        GLU,
        ACT,
        BIAS,
        RES,
        APART,
        PDL,
        0,
    )
    other: gl.constexpr = (
        PARTS,
        BN,
        STAGES,
        GROUP,
        ASM,
        ZEROS,
        SCALED,
        GLU,
        ACT,
        BIAS,
        RES,
        APART,
        PDL,
        1,
    )
    copying: gl.constexpr = (PARTS, BN, STAGES, GLU, PDL)
    # What the copying warp does not need of the registers goes to the others.
    gl.warp_specialize(
        [(_consume, work + one), (_consume, work + other), (_produce, copies + copying)],
        [4, 1], [240, 24],
    )  # fmt: skip
