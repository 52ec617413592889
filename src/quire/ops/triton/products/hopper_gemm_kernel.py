"""The kernel of `hopper_gemm.py`: wgmma with weights of 4 or 8 bits as the left operand.

A tile is some weight rows by BN rows of x. One warp copies words of weights and inputs by TMA to a
ring in shared memory, 32 words of a row at a time. It runs ahead of two or three warpgroups that
share the weight rows. A thread reads the words of its part of the left operand from the ring. It
unpacks 64 inputs into registers while the tensor cores multiply the previous 64. The right operand
is x in an order that matches the unpacked weights, see `order_inputs`. In a gated layer a tile's
weight rows are 8 gate rows, the 8 matching up rows, and so on, so that a thread has sums of both.

If the same number of programs shares each tile, they exchange their sums through a workspace. Each
program adds the sums of some rows of x, in order, and stores them. Otherwise programs share the
inputs of all tiles evenly (stream-K). Each has a run of steps, which may begin and end within a
tile, and the last program to arrive adds a tile's sums."""

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

ROWS = gl.constexpr(64)
"""Weight rows of a product of a warpgroup."""
WORDS = gl.constexpr(32)
"""Words of 32 bits of a weight row in a step: 128 bytes, the width of the swizzle."""
PART = gl.constexpr(64)
"""Inputs that are unpacked at a time. With more, two parts and the sums would not fit the
registers."""


@gluon.constexpr_function
def _lot_layout() -> gl.DistributedLinearLayout:
    """Returns a layout in which each thread has eight neighbouring words of two rows, without bank
    conflicts."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )


@gluon.constexpr_function
def step_inputs(bits: int) -> int:
    """Returns the number of inputs of a step."""
    return 32 * 32 // bits


@gluon.constexpr_function
def parts_of(bits: int) -> int:
    """Returns the number of parts of a step."""
    return 32 * 32 // bits // 64


@gluon.constexpr_function
def _part_layout(bits: int) -> gl.DistributedLinearLayout:
    """Returns the layout of a part, [rows, threads of four, words]: each thread has 2 or 4 words of
    two rows."""
    more = [[0, 0, 2]] if bits == 8 else []
    return gl.DistributedLinearLayout(
        [[0, 0, 1], *more, [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, bits // 2],
    )


@gluon.jit
def _halve(words):
    """Returns the first and the second half of each thread's words [ROWS, 4, words]."""
    half: gl.constexpr = words.shape[2] // 2
    return gl.split(gl.permute(gl.reshape(words, [ROWS, 4, 2, half]), (0, 1, 3, 2)))


@gluon.jit
def _parts(tiles, tile, BITS: gl.constexpr):
    """Returns the words of a warpgroup's rows in a step, for each part."""
    layout: gl.constexpr = _part_layout(BITS)
    words = gl.reshape(tiles.index(tile).load(_lot_layout()), [ROWS, 4, 8])
    low, high = _halve(words)
    if BITS == 8:
        return (
            gl.convert_layout(low, layout, assert_trivial=True),
            gl.convert_layout(high, layout, assert_trivial=True),
        )
    else:
        a, b = _halve(low)
        c, d = _halve(high)
        return (
            gl.convert_layout(a, layout, assert_trivial=True),
            gl.convert_layout(b, layout, assert_trivial=True),
            gl.convert_layout(c, layout, assert_trivial=True),
            gl.convert_layout(d, layout, assert_trivial=True),
        )


@gluon.jit
def _keep_order():
    """Keeps arithmetic on its side of this point, by a loop that runs once and has no effect. The
    assembler does not move arithmetic across loops."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred again;
        AGAIN:
        activemask.b32 $0;
        setp.eq.u32 again, $0, 0;
        @again bra AGAIN;
        }""",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _spread(numbers, words):
    """Repeats numbers of rows and threads for each of their words."""
    numbers, _ = gl.broadcast(numbers[:, :, None], words)
    return numbers


@gluon.jit
def _unpack4(words, constants, ASM: gl.constexpr, BN: gl.constexpr):
    """Returns weights [ROWS, PART]. The axes are row, thread of four, value of a pair, and pairs
    from the lowest bits on."""
    s0, s1, z0, z1 = constants
    kind = s0.dtype
    v0, v1, v2, v3, v4, v5, v6, v7 = gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r",
        [words, _spread(s0, words), _spread(s1, words), _spread(z0, words), _spread(z1, words)],
        dtype=(kind, kind, kind, kind, kind, kind, kind, kind), is_pure=BN < 128, pack=2,
    )  # fmt: skip
    low = gl.join(gl.join(v0, v1), gl.join(v2, v3))
    high = gl.join(gl.join(v4, v5), gl.join(v6, v7))
    x = gl.reshape(gl.join(low, high), [ROWS, 4, 2, 2, 2, 2])
    return gl.reshape(gl.permute(x, (0, 5, 4, 3, 1, 2)), [ROWS, PART])


@gluon.jit
def _unpack8(words, constants, ASM: gl.constexpr, BN: gl.constexpr):
    """Returns weights [ROWS, PART]. The axes are row, thread of four, half of its words, value of a
    pair, and pairs from the lowest bits on."""
    scale, _, zero, _ = constants
    kind = scale.dtype
    v0, v1, v2, v3 = gl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r,r,r,r", [words, _spread(scale, words), _spread(zero, words)],
        dtype=(kind, kind, kind, kind), is_pure=BN < 128, pack=2,
    )  # fmt: skip
    x = gl.reshape(gl.join(gl.join(v0, v1), gl.join(v2, v3)), [ROWS, 4, 2, 2, 2, 2])
    return gl.reshape(gl.permute(x, (0, 2, 5, 4, 1, 3)), [ROWS, PART])


@gluon.jit
def _unpack(words, constants, ASM: gl.constexpr, BN: gl.constexpr, BITS: gl.constexpr):
    """Returns weights [ROWS, PART] in the layout of the left operand."""
    if BITS == 8:
        x = _unpack8(words, constants, ASM, BN)
    else:
        x = _unpack4(words, constants, ASM, BN)
    layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout(BN), 2)
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _owner(position, total, programs):
    """Returns the program whose run contains a position."""
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
    """Returns the weight rows of tiles. Rows past the last are clamped to it."""
    if GLU:
        rows = gl.minimum(rows // 16 * 8 + rows % 8, N - 1) + rows // 8 % 2 * N
    else:
        rows = gl.minimum(rows, N - 1)
    return rows


@gluon.jit
def _weight_rows(row, N, GLU: gl.constexpr, BITS: gl.constexpr):
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _part_layout(BITS)))
    return stored_rows(row + gl.arange(0, ROWS, layout=layout), N, GLU)


@gluon.jit
def _ask_weights(desc, bar, tiles, stage, nt, step, CONSUMERS: gl.constexpr, GLU: gl.constexpr):
    boxes = tiles
    if GLU:
        boxes = reinterpret(
            tiles,
            gl.int32,
            [tiles.shape[0], ROWS // 16, 2, 8, WORDS],
            gl.NVMMASharedLayout(128, 32, 4),
        )  # fmt: skip
    for which in gl.static_range(CONSUMERS):
        row = _first_row(nt, CONSUMERS, which)
        box = boxes.index(stage * CONSUMERS + which)
        at = [row // 16, 0, 0, step * WORDS] if GLU else [row, step * WORDS]
        load_box(desc, at, bar.index(stage), box)


@gluon.jit
def _ask_inputs(desc, bar, tiles, stage, mt, step, BN: gl.constexpr, BITS: gl.constexpr):
    PARTS: gl.constexpr = parts_of(BITS)
    for part in gl.static_range(PARTS):
        load_box(
            desc, [mt * BN, (step * PARTS + part) * PART], bar.index(stage),
            tiles.index(stage * PARTS + part),
        )  # fmt: skip


@gluon.jit
def _next(nt, mt, step, m_tiles, steps):
    """Returns the next step. At the end of a tile this is the next tile's first step.

    It counts up, because divisions would take as long as a step's copies."""
    step += 1
    ended = step == steps
    step = gl.where(ended, 0, step)
    mt = gl.where(ended, mt + 1, mt)
    ended = mt == m_tiles
    return gl.where(ended, nt + 1, nt), gl.where(ended, 0, mt), step


@gluon.jit
def _turn(stage, phase, STAGES: gl.constexpr):
    """Returns the next stage of the ring, and the phase of its barriers."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _produce(
    x_desc, w_desc, x_tiles, w_tiles, full, empty, m_tiles, steps, total,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, BITS: gl.constexpr,
    GLU: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Copies the operands of the program's steps as soon as the ring has room."""
    BYTES: gl.constexpr = BN * step_inputs(BITS) * 2 + CONSUMERS * ROWS * WORDS * 4
    programs = gl.num_programs(0)
    begin = begin_of(gl.program_id(0), total, programs)
    end = begin_of(gl.program_id(0) + 1, total, programs)
    first = gl.minimum(end, begin + STAGES)
    nt = begin // steps // m_tiles
    mt = begin // steps % m_tiles
    step = begin % steps
    first_mt = mt
    first_step = step
    # Weights do not depend on the predecessor.
    for i in range(begin, first):
        mbarrier.expect(full.index(i - begin), BYTES)
        _ask_weights(w_desc, full, w_tiles, i - begin, nt, step, CONSUMERS, GLU)
        nt, mt, step = _next(nt, mt, step, m_tiles, steps)
    if PDL:
        wait_for_predecessor()
    for i in range(begin, first):
        _ask_inputs(x_desc, full, x_tiles, i - begin, first_mt, first_step, BN, BITS)
        _, first_mt, first_step = _next(0, first_mt, first_step, m_tiles, steps)
    stage = begin * 0
    phase = begin * 0
    for _ in range(first, end):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), BYTES)
        _ask_weights(w_desc, full, w_tiles, stage, nt, step, CONSUMERS, GLU)
        _ask_inputs(x_desc, full, x_tiles, stage, mt, step, BN, BITS)
        nt, mt, step = _next(nt, mt, step, m_tiles, steps)
        stage, phase = _turn(stage, phase, STAGES)


@gluon.jit
def _slot(program, behind, CONSUMERS: gl.constexpr, WHICH: gl.constexpr):
    """Returns the slot for a warpgroup's sums of a tile. A program has one for its first tile, and
    one for its last tile (`behind`)."""
    return (2 * program + behind) * CONSUMERS + WHICH


@gluon.jit
def _sum_pointers(ptr, slot, BN: gl.constexpr):
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums_layout(BN)))
    cols = gl.arange(0, BN, layout=gl.SliceLayout(0, sums_layout(BN)))
    return ptr + slot.to(gl.int64) * (ROWS * BN) + (rows[:, None] * BN + cols[None, :])


@gluon.jit
def _load_sums(ptr, slot, wanted, BN: gl.constexpr):
    """Returns a warpgroup's sums if `wanted`, else zeros.

    The load bypasses L1, which does not see other programs' writes."""
    return gl.load(_sum_pointers(ptr, slot, BN), mask=wanted, other=0.0, cache_modifier=".cg")


@gluon.jit
def reduce_split_k(
    sums, tile, chunks, total, parts_ptr, counters_ptr, CONSUMERS: gl.constexpr, BN: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Returns a tile's sums over its programs, and whether they are complete.

    Only the last program to arrive has the complete sums."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    first = _owner(tile * chunks, total, programs)
    count = _owner((tile + 1) * chunks - 1, total, programs) - first + 1
    whole = count == 1
    if count > 1:
        behind = begin_of(program, total, programs) // chunks != tile
        gl.store(_sum_pointers(parts_ptr, _slot(program, behind, CONSUMERS, WHICH), BN), sums)
        barrier()  # All parts are written before the one atomic that signals them.
        counter_ptr = counters_ptr + first * CONSUMERS + WHICH
        whole = gl.atomic_add(counter_ptr, 1, sem="acq_rel") == count - 1
        if whole:
            behind = begin_of(first, total, programs) // chunks != tile
            # If registers suffice, two loads are in flight, because a load takes longer
            # than the additions.
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
    """Returns the sums of weight rows from `row` on, times the scales of outputs, plus biases."""
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
    """Computes the epilogue of a tile: scales of outputs, bias, activation, residual and store."""
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
def _slice(ptr, slot, first, BN: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns COLUMNS columns of a warpgroup's sums, from the column `first` on."""
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, sums_layout(COLUMNS)))
    cols = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, sums_layout(COLUMNS)))
    at = slot.to(gl.int64) * (ROWS * BN) + (rows[:, None] * BN + cols[None, :])
    return gl.load(ptr + at, cache_modifier=".cg")


@gluon.jit
def _finish_together(
    sums, nt, mt, tile, pointers, sizes, strides, CONSUMERS: gl.constexpr, BN: gl.constexpr,
    SCALED: gl.constexpr, GLU: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
    RES: gl.constexpr, APART: gl.constexpr, TOGETHER: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Computes the epilogue of a tile that TOGETHER programs share. The programs all run at once,
    because there are at most as many of them as multiprocessors."""
    SLICES: gl.constexpr = min(1 << (TOGETHER.bit_length() - 1), BN // 8)
    COLUMNS: gl.constexpr = BN // SLICES
    _, _, _, _, _, parts_ptr, counters_ptr = pointers
    program = gl.program_id(0)
    own = program % TOGETHER
    gl.store(_sum_pointers(parts_ptr, program * CONSUMERS + WHICH, BN), sums)
    barrier()  # All parts are written before the one atomic that signals them.
    counter_ptr = counters_ptr + tile * CONSUMERS + WHICH
    there = gl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    while there < TOGETHER:
        there = gl.atomic_add(counter_ptr, 0, sem="acquire")
    if own < SLICES:
        slot = (program - own) * CONSUMERS + WHICH
        part = _slice(parts_ptr, slot, own * COLUMNS, BN, COLUMNS)
        for other in gl.static_range(1, TOGETHER):
            part += _slice(parts_ptr, slot + other * CONSUMERS, own * COLUMNS, BN, COLUMNS)
        _finish(
            part, nt, mt * SLICES + own, pointers, sizes, strides, CONSUMERS, COLUMNS, SCALED, GLU,
            ACT, BIAS, RES, APART, WHICH,
        )  # fmt: skip
    # The last program to leave resets the counter.
    if gl.atomic_add(counter_ptr, 1, sem="relaxed") == 2 * TOGETHER - 1:
        gl.store(counter_ptr, 0)


@gluon.jit
def _numbers(
    scales, rows, step, BITS: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr
):  # fmt: skip
    """Returns the stored scales and zeros of a step, for rows and the four threads of a row,
    [ROWS, 4]. Steps past the last use the last group."""
    scale_ptr, zero_ptr, stride, groups = scales
    threads = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, _part_layout(BITS))))
    scale = gl.full([ROWS, 4], 1.0, gl.float32, gl.SliceLayout(2, _part_layout(BITS)))
    zero = gl.full([ROWS, 4], 1 << BITS - 1, gl.uint8, gl.SliceLayout(2, _part_layout(BITS)))
    if GROUP > 0:
        # Two threads hold the first half of a step of 256 inputs.
        chunk = 2 * step + threads // 2 if BITS == 4 else step + threads * 0
        group = gl.minimum(chunk // GROUP, groups - 1)
        at = rows[:, None] * stride + group[None, :]
        scale = gl.load(scale_ptr + at)
        if ZEROS:
            zero = gl.load(zero_ptr + at)
    return scale, zero


@gluon.jit
def _constants(numbers, dtype: gl.constexpr, FACTOR: gl.constexpr):
    """Returns operands for `INSTRUCTIONS` of `hopper_gemm.py`: factors and zeros for values in low
    and in high bits. FACTOR multiplies the scales."""
    scale, zero = numbers
    s0 = (scale.to(gl.float32) * FACTOR).to(dtype)
    if dtype == gl.bfloat16:
        s1 = (s0.to(gl.float32) * 0.0625).to(dtype)
        z0 = zero.to(gl.int16).to(dtype, bitcast=True)
        z1 = (zero.to(gl.int16) << 4).to(dtype, bitcast=True)
    else:
        s1 = s0
        z0 = (zero.to(gl.float32) + 1024.0).to(dtype)
        z1 = z0
    return s0, s1, z0, z1


@gluon.jit
def _consume(
    x_tiles, w_tiles, full, empty, pointers, sizes, strides, groups,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, BITS: gl.constexpr,
    GROUP: gl.constexpr, ASM: gl.constexpr, FACTOR: gl.constexpr, ZEROS: gl.constexpr,
    SCALED: gl.constexpr, GLU: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
    RES: gl.constexpr, APART: gl.constexpr, TOGETHER: gl.constexpr, PDL: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Multiplies a warpgroup's ROWS weight rows of the program's tiles."""
    PARTS: gl.constexpr = parts_of(BITS)
    scale_ptr, zero_ptr, _, _, _, parts_ptr, counters_ptr = pointers
    scales = (scale_ptr, zero_ptr, strides[0], groups)
    _, N, m_tiles, steps, total = sizes
    dtype: gl.constexpr = x_tiles.dtype
    begin = begin_of(gl.program_id(0), total, gl.num_programs(0))
    end = begin_of(gl.program_id(0) + 1, total, gl.num_programs(0))
    position = begin
    stage = begin * 0
    phase = begin * 0
    while position < end:
        tile = position // steps
        nt = tile // m_tiles
        mt = tile % m_tiles
        until = gl.minimum(end, (tile + 1) * steps)
        start = tile * steps
        rows = _weight_rows(_first_row(nt, CONSUMERS, WHICH), N, GLU, BITS)
        numbers = _numbers(scales, rows, position - start, BITS, GROUP, ZEROS)
        constants = _constants(numbers, dtype, FACTOR)
        ahead = _numbers(scales, rows, position + 1 - start, BITS, GROUP, ZEROS)
        acc = gl.zeros([ROWS, BN], gl.float32, sums_layout(BN))
        mbarrier.wait(full.index(stage), phase)
        parts = _parts(w_tiles, stage * CONSUMERS + WHICH, BITS)
        a = _unpack(parts[0], constants, ASM, BN, BITS)
        for i in range(position, until):
            next_stage, next_phase = _turn(stage, phase, STAGES)
            # No product is in flight between rounds. Otherwise the assembler would wait for each
            # single product.
            for part in gl.static_range(PARTS):
                x = x_tiles.index(stage * PARTS + part).permute((1, 0))
                acc = warpgroup_mma(a, x, acc, is_async=True)
                if BN >= 128:
                    # Without this, all parts are unpacked between the first products, which is
                    # faster if products are short.
                    _keep_order()
                if part == PARTS - 1:
                    mbarrier.wait(full.index(next_stage), next_phase, pred=i + 1 < end)
                    parts = _parts(w_tiles, next_stage * CONSUMERS + WHICH, BITS)
                    constants = _constants(ahead, dtype, FACTOR)
                    ahead = _numbers(scales, rows, i + 2 - start, BITS, GROUP, ZEROS)
                if part > 0:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                a = _unpack(parts[(part + 1) % PARTS], constants, ASM, BN, BITS)
            if BN >= 128:
                _keep_order()
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(stage), count=1)
            stage = next_stage
            phase = next_phase
        if PDL:
            # Memory is written, and results of the predecessor are read, only after this wait.
            wait_for_predecessor()
        if TOGETHER > 1:
            _finish_together(
                acc, nt, mt, tile, pointers, sizes, strides, CONSUMERS, BN, SCALED, GLU, ACT, BIAS,
                RES, APART, TOGETHER, WHICH,
            )  # fmt: skip
        else:
            sums, whole = reduce_split_k(
                acc, tile, steps, total, parts_ptr, counters_ptr, CONSUMERS, BN, WHICH
            )
            if whole:
                _finish(
                    sums, nt, mt, pointers, sizes, strides, CONSUMERS, BN, SCALED, GLU, ACT, BIAS,
                    RES, APART, WHICH,
                )  # fmt: skip
        position = until


SIZES = [
    "M", "N", "m_tiles", "steps", "total", "groups", "stride_sn", "stride_rm", "stride_ym",
]  # fmt: skip
"""Arguments whose values do not cause further compilations."""


@gluon.jit(do_not_specialize=SIZES)
def multiply_steps(
    x_desc, w_desc, scale_ptr, zero_ptr, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr,
    M, N, m_tiles, steps, total, groups, stride_sn, stride_rm, stride_ym,
    CONSUMERS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, BITS: gl.constexpr,
    GROUP: gl.constexpr, ASM: gl.constexpr, FACTOR: gl.constexpr, ZEROS: gl.constexpr,
    SCALED: gl.constexpr, GLU: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
    RES: gl.constexpr, APART: gl.constexpr, TOGETHER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Computes y [M, N] of x [M, K] and w [N, K] (gated: [2 N, K]).

    A tile is ROWS weight rows for each of CONSUMERS warpgroups, by BN rows of x.

    Args:
        w_desc: words of weight rows. In a gated layer it is [N / 8, gate or up, 8, words].
        total: number of steps of all tiles.
        GROUP: inputs of a group / 128. 0 means that each output has one scale, if SCALED.
        TOGETHER: number of programs of each tile. With 1, programs share all tiles evenly.
    """
    x_tiles = gl.allocate_shared_memory(
        x_desc.dtype, [STAGES * parts_of(BITS), BN, PART], gl.NVMMASharedLayout(128, 16, 2)
    )
    w_tiles = gl.allocate_shared_memory(
        gl.int32, [STAGES * CONSUMERS, ROWS, WORDS], gl.NVMMASharedLayout(128, 32, 2)
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    barrier()
    if PDL:
        release_successor()
    work = (
        x_tiles, w_tiles, full, empty,
        (scale_ptr, zero_ptr, bias_ptr, res_ptr, y_ptr, parts_ptr, counters_ptr),
        (M, N, m_tiles, steps, total), (stride_sn, stride_rm, stride_ym), groups,
    )  # fmt: skip
    copies = (x_desc, w_desc, x_tiles, w_tiles, full, empty, m_tiles, steps, total)
    copying: gl.constexpr = (CONSUMERS, BN, STAGES, BITS, GLU, PDL)
    w0: gl.constexpr = (
        CONSUMERS, BN, STAGES, BITS, GROUP, ASM, FACTOR, ZEROS, SCALED, GLU, ACT, BIAS, RES, APART,
        TOGETHER, PDL, 0,
    )  # fmt: skip
    w1: gl.constexpr = (
        CONSUMERS, BN, STAGES, BITS, GROUP, ASM, FACTOR, ZEROS, SCALED, GLU, ACT, BIAS, RES, APART,
        TOGETHER, PDL, 1,
    )  # fmt: skip
    w2: gl.constexpr = (
        CONSUMERS, BN, STAGES, BITS, GROUP, ASM, FACTOR, ZEROS, SCALED, GLU, ACT, BIAS, RES, APART,
        TOGETHER, PDL, 2,
    )  # fmt: skip
    # The copying warp passes registers that it does not need to the other warps.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, concat(work, w0)), (_consume, concat(work, w1)),
                (_produce, concat(copies, copying)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, concat(work, w0)), (_consume, concat(work, w1)),
                (_consume, concat(work, w2)), (_produce, concat(copies, copying)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip
