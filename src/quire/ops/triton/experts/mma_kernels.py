"""Products of experts and few tokens on tensor cores, with weights unpacked in registers.

As in `mma_gemv`, each thread loads 16 neighbouring bytes of two weight rows, and the matching
inputs of a token, into the registers of `mma.sync`. A program's warps share the inputs in turns of
64 bytes of a row. A program has R tiles of 16 rows of one expert, which use the same loaded inputs.
It has up to 8 NT of the expert's tokens, which use the same unpacked weights.

The scale of a group of 64 bytes or more is applied to the group's sum, in fp32. In groups of 32
4-bit floats, the four threads of a row hold four groups, and one instruction adds values of all of
them. So the values are multiplied by their scales first. This is exact because scales are powers of
two."""

# Tuples that grow in a loop unrolled at compile time have no single type.
# mypy: disable-error-code="assignment, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.experts.kernels import swiglu
from quire.ops.triton.products.common import wait_for_predecessor
from quire.ops.triton.products.mma_gemv import (
    CHUNK,
    keep_order,
    load_inputs,
    load_words,
    multiply_pairs,
    pair,
)
from quire.ops.triton.products.quantized_tiles import LIFT


@triton.jit
def _in_turns(p0, p1, p2, p3):
    """Returns eight inputs, given as pairs of neighbours, in the order in which `UNPACK` pairs
    4-bit values."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $4, $6, 0x5410; prmt.b32 $1, $4, $6, 0x7632;"
        "prmt.b32 $2, $5, $7, 0x5410; prmt.b32 $3, $5, $7, 0x7632;",
        "=&r,=&r,=&r,=&r,r,r,r,r", [p0, p1, p2, p3],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _unpack4(UNPACK: tl.constexpr, word, factor):
    """Returns the pairs of a word of 4 bits."""
    return tl.inline_asm_elementwise(
        UNPACK, "=&r,=&r,=&r,=&r,r,r", [word, factor],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _unpack8(UNPACK: tl.constexpr, word):
    """Returns the pairs of a word of 8 bits."""
    return tl.inline_asm_elementwise(
        UNPACK, "=&r,=&r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def _rows(first, lane8, N, R: tl.constexpr, GATED: tl.constexpr):
    """Returns the two rows of each thread in each of R tiles. Gated tiles have 8 gate rows and the
    matching up rows.

    Rows past the last are clamped to it, and not stored."""
    rows = ()
    for r in tl.static_range(R):
        if GATED:
            low = tl.minimum(first + r * 8 + lane8, N - 1)
            rows = rows + ((low, low + N),)
        else:
            low = tl.minimum(first + r * 16 + lane8, N - 1)
            rows = rows + ((low, tl.minimum(first + r * 16 + 8 + lane8, N - 1)),)
    return rows


@triton.jit
def _load_chunk(
    rows, base, w_ptr, s_ptr, z_ptr, stride_wn, stride_sn, at, wanted,
    R: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Returns 4 words of each thread's rows from word `at` on, with the scales and zeros of their
    groups, if the format has them.

    Rows are counted from row `base`. A group has GROUP words."""
    words = ()
    scales = ()
    zeros = ()
    for r in tl.static_range(R):
        low, high = rows[r]
        low = base + low
        high = base + high
        words = words + ((
            load_words(w_ptr + low * stride_wn + at, wanted),
            load_words(w_ptr + high * stride_wn + at, wanted),
        ),)  # fmt: skip
        if GROUP > 0:
            low = low * stride_sn + at // GROUP
            high = high * stride_sn + at // GROUP
            scales = scales + ((tl.load(s_ptr + low), tl.load(s_ptr + high)),)
            if HAS_ZEROS:
                zeros = zeros + ((tl.load(z_ptr + low), tl.load(z_ptr + high)),)
    return words, scales, zeros


@triton.jit
def _load_pairs(x_ptrs, at, NT: tl.constexpr, PAIRS: tl.constexpr):
    """Returns the inputs of each token for 4 weight words from word `at` on, PAIRS per word."""
    every = ()
    for n in tl.static_range(NT):
        own = ()
        for part in tl.static_range(PAIRS):
            p0, p1, p2, p3 = load_inputs(x_ptrs[n] + at * PAIRS + part * 4)
            own = own + (p0, p1, p2, p3)
        every = every + (own,)
    return every


@triton.jit
def _inputs(loaded, inside, NT: tl.constexpr, PAIRS: tl.constexpr, EVEN: tl.constexpr):
    """Returns loaded pairs in the order in which words are unpacked. Pairs that are not `inside`
    are 0."""
    every = ()
    for n in tl.static_range(NT):
        own = ()
        for part in tl.static_range(PAIRS):
            p0 = loaded[n][4 * part]
            p1 = loaded[n][4 * part + 1]
            p2 = loaded[n][4 * part + 2]
            p3 = loaded[n][4 * part + 3]
            if not EVEN:
                p0 = tl.where(inside, p0, 0)
                p1 = tl.where(inside, p1, 0)
                p2 = tl.where(inside, p2, 0)
                p3 = tl.where(inside, p3, 0)
            if PAIRS == 4:
                p0, p1, p2, p3 = _in_turns(p0, p1, p2, p3)
            own = own + (p0, p1, p2, p3)
        every = every + (own,)
    return every


@triton.jit
def _power(scale):
    """Returns 2^126 / LIFT times the power of two of a stored exponent, as a pair of bf16."""
    bits = tl.minimum(scale.to(tl.int32) + 63, 255) << 7
    return bits | (bits << 16)


@triton.jit
def _scale(scales, r: tl.constexpr, row: tl.constexpr, share, GROUP: tl.constexpr,
           E2M1: tl.constexpr):  # fmt: skip
    value = share
    if GROUP > 0 and not E2M1:
        value *= scales[r][row].to(tl.float32)
    return value


@triton.jit
def _add_chunk(
    sums, chunk, inputs, share, WARPS: tl.constexpr, R: tl.constexpr, NT: tl.constexpr,
    PAIRS: tl.constexpr, UNPACK: tl.constexpr, PRODUCT: tl.constexpr, FP16: tl.constexpr,
    E2M1: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Returns sums of R * NT tiles plus the products of a chunk.

    With APART the chunk is summed separately, and its sums are multiplied by the scales of their
    groups and by `share`."""
    words, scales, zeros = chunk
    new = ()
    for r in tl.static_range(R):
        low, high = words[r]
        own = ()
        for n in tl.static_range(NT):
            if APART:
                none = tl.zeros([32 * WARPS], tl.float32)
                own = own + ((none, none, none, none),)
            else:
                own = own + (sums[r * NT + n],)
        if PAIRS == 4:
            if E2M1:
                f0 = _power(scales[r][0])
                f1 = _power(scales[r][1])
            elif HAS_ZEROS:
                f0 = pair(zeros[r], 0, WARPS, FP16, True)
                f1 = pair(zeros[r], 1, WARPS, FP16, True)
            else:
                f0 = pair((), 0, WARPS, FP16, False)
                f1 = f0
            for i in tl.static_range(4):
                a0, a1, a2, a3 = _unpack4(UNPACK, low[i], f0)
                b0, b1, b2, b3 = _unpack4(UNPACK, high[i], f1)
                added = ()
                for n in tl.static_range(NT):
                    x = inputs[n]
                    t = multiply_pairs(PRODUCT, a0, b0, a1, b1, x[4 * i], x[4 * i + 1], own[n])
                    t = multiply_pairs(PRODUCT, a2, b2, a3, b3, x[4 * i + 2], x[4 * i + 3], t)
                    added = added + (t,)
                own = added
        else:
            for i in tl.static_range(4):
                a0, a1 = _unpack8(UNPACK, low[i])
                b0, b1 = _unpack8(UNPACK, high[i])
                added = ()
                for n in tl.static_range(NT):
                    x = inputs[n]
                    t = multiply_pairs(PRODUCT, a0, b0, a1, b1, x[2 * i], x[2 * i + 1], own[n])
                    added = added + (t,)
                own = added
        if APART:
            s0 = _scale(scales, r, 0, share, GROUP, E2M1)
            s1 = _scale(scales, r, 1, share, GROUP, E2M1)
            for n in tl.static_range(NT):
                y0, y1, y2, y3 = own[n]
                t0, t1, t2, t3 = sums[r * NT + n]
                new = new + ((t0 + y0 * s0, t1 + y1 * s0, t2 + y2 * s1, t3 + y3 * s1),)
        else:
            new = new + own
    return new


@triton.jit
def _reduce_warps(sums, COUNT: tl.constexpr, WARPS: tl.constexpr):
    """Returns the sums over warps of COUNT tiles. COUNT is 1 or even."""
    met = ()
    if COUNT == 1:
        y0, y1, y2, y3 = sums[0]
        if WARPS > 1:
            total = tl.join(tl.join(y0, y1), tl.join(y2, y3))
            total = tl.sum(tl.reshape(total, [WARPS, 32, 2, 2]), 0)
            y02, y13 = tl.split(total)
            y0, y1 = tl.split(y02)
            y2, y3 = tl.split(y13)
        met = met + ((y0, y1, y2, y3),)
    else:
        for at in tl.static_range(0, COUNT, 2):
            y0, y1, y2, y3 = sums[at]
            z0, z1, z2, z3 = sums[at + 1]
            y = tl.join(tl.join(y0, y1), tl.join(y2, y3))
            z = tl.join(tl.join(z0, z1), tl.join(z2, z3))
            total = tl.join(y, z)
            if WARPS > 1:
                total = tl.sum(tl.reshape(total, [WARPS, 32, 2, 2, 2]), 0)
            y, z = tl.split(total)
            y02, y13 = tl.split(y)
            y0, y1 = tl.split(y02)
            y2, y3 = tl.split(y13)
            met = met + ((y0, y1, y2, y3),)
            z02, z13 = tl.split(z)
            z0, z1 = tl.split(z02)
            z2, z3 = tl.split(z13)
            met = met + ((z0, z1, z2, z3),)
    return met


@triton.jit
def _store(y, y_ptr, a, cols, N, wanted):
    at = y_ptr + a.to(tl.int64) * N + cols
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=wanted & (cols < N))


@triton.jit(do_not_specialize=["most"])
def mma_rows_kernel(
    x_ptr, ids_ptr, order_ptr, blocks_ptr, most, weights_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, y_ptr,
    N, W, stride_xm, stride_wn, stride_sn,
    SORTED: tl.constexpr, ROWS_PER_X: tl.constexpr, GATED: tl.constexpr, WARPS: tl.constexpr,
    COUNT: tl.constexpr, R: tl.constexpr, NT: tl.constexpr, SINGLE: tl.constexpr,
    EVEN: tl.constexpr, PAIRS: tl.constexpr, UNPACK: tl.constexpr, PRODUCT: tl.constexpr,
    FP16: tl.constexpr, E2M1: tl.constexpr, GROUP: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    SHIFT: tl.constexpr, CUBIC: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y [A, N] for all assignments to experts. Assignment a uses row a // ROWS_PER_X of x.

    y is gated units, or outputs times routing weights. Grid: tiles of outputs, blocks of sorted
    assignments. If not SORTED, it is: tiles of outputs, assignments. Tiles of a block run at the
    same time, so that its inputs stay in L1.

    Args:
        x_ptr: int32 pairs of inputs. `stride_xm` counts pairs.
        W: words of a weight row.
        COUNT: chunks that a warp has in flight.
        SINGLE: a warp has at most COUNT chunks.
        EVEN: every chunk is whole.
        PAIRS: pairs of inputs in a word.
        GROUP: words that share a scale.
    """
    if PDL and GATED:
        wait_for_predecessor(False)
    pid, block = tl.program_id(0), tl.program_id(1)
    if SORTED:
        missing = block >= tl.load(blocks_ptr + 3 * most)
    else:
        expert = tl.load(ids_ptr + block)
        missing = expert < 0
    if missing:
        if PDL and not GATED:
            wait_for_predecessor(False)
        return
    thread = tl.arange(0, 32 * WARPS)
    lane8 = thread % 32 // 4
    lane = tl.arange(0, 32)
    m = lane % 4 * 2
    if SORTED:
        expert = tl.load(blocks_ptr + block)
        start = tl.load(blocks_ptr + most + block)
        end = tl.load(blocks_ptr + 2 * most + block)
    base = expert.to(tl.int64) * (2 * N if GATED else N)
    first = pid * (8 * R if GATED else 16 * R)
    rows = _rows(first, lane8, N, R, GATED)
    STEP: tl.constexpr = WARPS * COUNT * CHUNK
    own_at = thread // 32 * CHUNK + thread % 4 * 4
    chunks = ()
    for index in tl.static_range(COUNT):
        at = own_at + index * WARPS * CHUNK
        wanted = tl.full([32 * WARPS], 1, tl.int32)
        if not (SINGLE and EVEN):
            wanted = (at < W).to(tl.int32)
            at = tl.minimum(at, W - 4)
        chunks = chunks + (
            _load_chunk(rows, base, w_ptr, s_ptr, z_ptr, stride_wn, stride_sn, at, wanted, R,
                        GROUP, HAS_ZEROS),
        )  # fmt: skip
    # The epilogue's operands are loaded early, because nothing would hide their latency at the
    # end.
    ends = ()
    for r in tl.static_range(R):
        low, high = _rows(first + r * (8 if GATED else 16), lane // 4, N, 1, GATED)[0]
        s0 = 1.0
        s1 = 1.0
        if HAS_SCALES:
            s0 = tl.load(s_ptr + (base + low) * stride_sn).to(tl.float32)
            s1 = tl.load(s_ptr + (base + high) * stride_sn).to(tl.float32)
        b0 = 0.0
        b1 = 0.0
        if HAS_BIAS:
            b0 = tl.load(bias_ptr + base + low).to(tl.float32)
            b1 = tl.load(bias_ptr + base + high).to(tl.float32)
        ends = ends + ((s0, s1, b0, b1),)
    targets = ()
    x_ptrs = ()
    for n in tl.static_range(NT):
        if SORTED:
            # Columns of the product without a token repeat the last token, and are not stored.
            token = tl.load(order_ptr + tl.minimum(start + n * 8 + lane8, end - 1))
            a0 = tl.load(order_ptr + tl.minimum(start + n * 8 + m, end - 1))
            a1 = tl.load(order_ptr + tl.minimum(start + n * 8 + m + 1, end - 1))
        else:
            token = tl.full([32 * WARPS], 0, tl.int32) + block
            a0 = tl.full([32], 0, tl.int32) + block
            a1 = a0
        x_ptrs = x_ptrs + (x_ptr + (token // ROWS_PER_X).to(tl.int64) * stride_xm,)
        g0 = 1.0
        g1 = 1.0
        if not GATED:
            g0 = tl.load(weights_ptr + a0)
            g1 = tl.load(weights_ptr + a1)
        targets = targets + ((a0, a1, g0, g1),)
    if PDL and not GATED:
        wait_for_predecessor(False)
    sums = ()
    none = tl.zeros([32 * WARPS], tl.float32)
    for _ in tl.static_range(R * NT):
        sums = sums + ((none, none, none, none),)
    # Only the last round may be incomplete.
    whole = W // STEP * STEP
    loaded = ()
    if EARLY and not SINGLE:
        for index in tl.static_range(COUNT):
            at = tl.minimum(own_at + index * WARPS * CHUNK, W - 4)
            loaded = loaded + (_load_pairs(x_ptrs, at, NT, PAIRS),)
    if not SINGLE:
        for k in range(0, whole, STEP):
            current = chunks
            chunks = ()
            given = loaded
            if EARLY:
                loaded = ()
            for index in tl.static_range(COUNT):
                at = own_at + (k + STEP + index * WARPS * CHUNK)
                wanted = (at < W).to(tl.int32)
                at = tl.minimum(at, W - 4)
                chunks = chunks + (
                    _load_chunk(rows, base, w_ptr, s_ptr, z_ptr, stride_wn, stride_sn, at, wanted,
                                R, GROUP, HAS_ZEROS),
                )  # fmt: skip
                if EARLY:
                    loaded = loaded + (_load_pairs(x_ptrs, at, NT, PAIRS),)
            keep_order(thread)
            for index in tl.static_range(COUNT):
                at = own_at + (k + index * WARPS * CHUNK)
                if EARLY:
                    pairs = given[index]
                else:
                    pairs = _load_pairs(x_ptrs, at, NT, PAIRS)
                inputs = _inputs(pairs, at < W, NT, PAIRS, True)
                sums = _add_chunk(
                    sums, current[index], inputs, 1.0, WARPS, R, NT, PAIRS, UNPACK, PRODUCT, FP16,
                    E2M1, GROUP, HAS_ZEROS, GROUP > 0 and not E2M1,
                )  # fmt: skip
    if SINGLE or not EVEN:
        for index in tl.static_range(COUNT):
            at = own_at + (whole if not SINGLE else 0) + index * WARPS * CHUNK
            inside = at < W
            if not EVEN:
                at = tl.minimum(at, W - 4)
            if EARLY and not SINGLE:
                pairs = loaded[index]
            else:
                pairs = _load_pairs(x_ptrs, at, NT, PAIRS)
            inputs = _inputs(pairs, inside, NT, PAIRS, EVEN)
            sums = _add_chunk(
                sums, chunks[index], inputs, 1.0, WARPS, R, NT, PAIRS, UNPACK, PRODUCT, FP16, E2M1,
                GROUP, HAS_ZEROS, GROUP > 0 and not E2M1,
            )  # fmt: skip
    sums = _reduce_warps(sums, R * NT, WARPS)
    for r in tl.static_range(R):
        s0, s1, b0, b1 = ends[r]
        cols = first + r * (8 if GATED else 16) + lane // 4
        if E2M1:
            s0 = LIFT
            s1 = LIFT
        for n in tl.static_range(NT):
            y0, y1, y2, y3 = sums[r * NT + n]
            a0, a1, g0, g1 = targets[n]
            y0 = y0 * s0 + b0
            y1 = y1 * s0 + b0
            y2 = y2 * s1 + b1
            y3 = y3 * s1 + b1
            if SORTED:
                has0 = start + n * 8 + m < end
                has1 = start + n * 8 + m + 1 < end
            else:
                has0 = m == 0
                has1 = m < 0
            if GATED:
                y0 = swiglu(y0, y2, ALPHA, LIMIT, SHIFT, CUBIC)
                y1 = swiglu(y1, y3, ALPHA, LIMIT, SHIFT, CUBIC)
            _store(y0 * g0, y_ptr, a0, cols, N, has0)
            if SORTED:
                _store(y1 * g1, y_ptr, a1, cols, N, has1)
            if not GATED:
                _store(y2 * g0, y_ptr, a0, cols + 8, N, has0)
                if SORTED:
                    _store(y3 * g1, y_ptr, a1, cols + 8, N, has1)


@triton.jit
def _load_choice(
    rows, ids_ptr, w_ptr, s_ptr, z_ptr, N, W, chunk, CHUNKS, quarter, stride_wn, stride_sn,
    TOP_K: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Returns a chunk of the weights of a token's experts, see `_load_chunk`.

    Args:
        ids_ptr: points to the token's first expert id.
        CHUNKS: number of chunks of one expert.
    """
    choice = chunk // CHUNKS
    at = (chunk - choice * CHUNKS) * CHUNK + quarter * 4
    expert = tl.load(ids_ptr + tl.minimum(choice, TOP_K - 1))
    wanted = ((choice < TOP_K) & (expert >= 0) & (at < W)).to(tl.int32)
    base = tl.maximum(expert, 0).to(tl.int64) * N
    return _load_chunk(
        rows, base, w_ptr, s_ptr, z_ptr, stride_wn, stride_sn, tl.minimum(at, W - 4), wanted, R,
        GROUP, HAS_ZEROS,
    )  # fmt: skip


@triton.jit
def mma_sum_kernel(
    x_ptr, ids_ptr, weights_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, res_ptr, y_ptr, N, W, CHUNKS,
    stride_xm, stride_wn, stride_sn, stride_rm, stride_ym,
    TOP_K: tl.constexpr, WARPS: tl.constexpr, COUNT: tl.constexpr, R: tl.constexpr,
    SINGLE: tl.constexpr, PAIRS: tl.constexpr, UNPACK: tl.constexpr, PRODUCT: tl.constexpr,
    FP16: tl.constexpr, E2M1: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes y [T, N] from units x [T * k, K]: the weighted sum of the outputs of a token's
    experts, plus the residual.

    Warps share the chunks of all experts. Grid: tiles of outputs, tokens. GROUP is the number of
    words that share a scale, and exceeds a row's words if a row has one scale. For the other
    arguments see `mma_rows_kernel`."""
    pid, t = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids_ptr += t * TOP_K
    weights_ptr += t * TOP_K
    thread = tl.arange(0, 32 * WARPS)
    turn = thread // 32
    quarter = thread % 4
    lane = tl.arange(0, 32)
    first = pid * (16 * R)
    rows = _rows(first, thread % 32 // 4, N, R, False)
    STEP: tl.constexpr = WARPS * COUNT
    chunks = ()
    for index in tl.static_range(COUNT):
        chunks = chunks + (
            _load_choice(rows, ids_ptr, w_ptr, s_ptr, z_ptr, N, W, turn + index * WARPS, CHUNKS,
                         quarter, stride_wn, stride_sn, TOP_K, R, GROUP, HAS_ZEROS),
        )  # fmt: skip
    own = first + lane // 4
    ends = ()
    for r in tl.static_range(R):
        b0 = tl.zeros([32], tl.float32)
        b1 = tl.zeros([32], tl.float32)
        if HAS_BIAS:
            low, high = _rows(first + r * 16, lane // 4, N, 1, False)[0]
            for j in tl.static_range(TOP_K):
                expert = tl.load(ids_ptr + j)
                share = tl.where(expert >= 0, tl.load(weights_ptr + j), 0.0)
                base = tl.maximum(expert, 0).to(tl.int64) * N
                b0 += share * tl.load(bias_ptr + base + low).to(tl.float32)
                b1 += share * tl.load(bias_ptr + base + high).to(tl.float32)
        ends = ends + ((b0, b1),)
    if PDL:
        wait_for_predecessor(False)
    mine = lane % 4 == 0
    sums = ()
    none = tl.zeros([32 * WARPS], tl.float32)
    for _ in tl.static_range(R):
        sums = sums + ((none, none, none, none),)
    for c in range(0, STEP if SINGLE else TOP_K * CHUNKS, STEP):
        current = chunks
        if not SINGLE:
            chunks = ()
            for index in tl.static_range(COUNT):
                chunks = chunks + (
                    _load_choice(rows, ids_ptr, w_ptr, s_ptr, z_ptr, N, W,
                                 turn + (c + STEP + index * WARPS), CHUNKS, quarter, stride_wn,
                                 stride_sn, TOP_K, R, GROUP, HAS_ZEROS),
                )  # fmt: skip
            keep_order(thread)
        for index in tl.static_range(COUNT):
            chunk = turn + (c + index * WARPS)
            choice = chunk // CHUNKS
            at = (chunk - choice * CHUNKS) * CHUNK + quarter * 4
            known = tl.minimum(choice, TOP_K - 1)
            inside = (choice < TOP_K) & (tl.load(ids_ptr + known) >= 0)
            factor = tl.where(inside, tl.load(weights_ptr + known), 0.0)
            x_ptrs = (x_ptr + (t * TOP_K + known) * stride_xm,)
            pairs = _load_pairs(x_ptrs, tl.minimum(at, W - 4), 1, PAIRS)
            inputs = _inputs(pairs, inside & (at < W), 1, PAIRS, False)
            sums = _add_chunk(
                sums, current[index], inputs, factor, WARPS, R, 1, PAIRS, UNPACK, PRODUCT, FP16,
                E2M1, GROUP, HAS_ZEROS, True,
            )  # fmt: skip
    sums = _reduce_warps(sums, R, WARPS)
    for r in tl.static_range(R):
        low = sums[r][0]
        high = sums[r][2]
        if E2M1:
            low *= LIFT
            high *= LIFT
        cols = own + r * 16
        low += ends[r][0]
        high += ends[r][1]
        if HAS_RES:
            res = res_ptr + t * stride_rm + cols
            low += tl.load(res, mask=mine & (cols < N), other=0.0).to(tl.float32)
            high += tl.load(res + 8, mask=mine & (cols + 8 < N), other=0.0).to(tl.float32)
        at_y = y_ptr + t * stride_ym + cols
        tl.store(at_y, low.to(y_ptr.dtype.element_ty), mask=mine & (cols < N))
        tl.store(at_y + 8, high.to(y_ptr.dtype.element_ty), mask=mine & (cols + 8 < N))
