"""Parts of `hopper_kernel.py`: the order of a program's tiles of queries, and their attention."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quire.ops.triton.hopper_common import (
    barrier,
    copy_async,
    reinterpret,
    sums_layout,
)

ROWS_AT_ONCE = gl.constexpr(256)


@gluon.jit
def _row_of_tile(tile, query_start_ptr, num_rows, GROUP: gl.constexpr, BM: gl.constexpr):
    """See `attention_kernels.row_of_tile`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = -1
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = start + gl.arange(0, ROWS_AT_ONCE, layout=layout)
        first = gl.load(query_start_ptr + rows, mask=rows < num_rows, other=0)
        first = first * GROUP // BM + rows
        row += gl.sum(((first <= tile) & (rows < num_rows)).to(gl.int32), 0)
    first_tile = gl.load(query_start_ptr + row) * GROUP // BM + row
    return row, first_tile


@gluon.jit
def item_at(
    index, rows, window, GROUP: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Returns the program's tile number `index` as a tuple.

    Its entries are:

    * The KV head.
    * The row, and the tile's index in the row.
    * The row's first query, its number of queries, and its length.
    * The first and the last position of the tile.
    * The first KV position that the tile sees.
    * The first KV tile, and the number of KV tiles.

    An index past the last tile has no queries and no KV."""
    BM: gl.constexpr = CONSUMERS * ROWS
    query_start_ptr, seq_lens_ptr, num_rows, kv_heads, most, shortest = rows
    # The last tiles of a causal prompt have the most KV, so they come first. Every second round
    # goes backwards, so that programs get about the same amount of work.
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    place = index * programs + gl.where(index % 2 == 0, program, programs - 1 - program)
    head = place % kv_heads
    tile = gl.maximum(most - 1 - place // kv_heads, 0)
    row, first_tile = _row_of_tile(tile, query_start_ptr, num_rows, GROUP, BM)
    local = tile - first_tile
    q_start = gl.load(query_start_ptr + row)
    q_len = gl.load(query_start_ptr + row + 1) - q_start
    length = gl.load(seq_lens_ptr + row)
    first = length - q_len + local * BM // GROUP
    last = length - q_len + gl.minimum((local * BM + BM - 1) // GROUP, q_len - 1)
    begin = first * 0
    if WINDOW:
        begin = gl.maximum(first - window + 1, 0)
    low = begin // BN
    live = (place < kv_heads * most) & (q_len >= shortest) & (local * BM < q_len * GROUP)
    count = gl.where(live, last // BN + 1 - low, 0)
    q_len = gl.where(live, q_len, 0)
    return head, row, local, q_start, q_len, length, first, last, begin, low, count


# A warpgroup's queries against tiles of KV, which it reads from rings in shared memory.

ROWS = gl.constexpr(64)
"""(token, head) pairs of a warpgroup."""
COLUMNS = gl.constexpr(64)
"""Dimensions of a head that one copy of a page includes: 128 bytes, the width of the swizzle."""
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def _lines(columns: int) -> gl.BlockedLayout:
    """Returns the layout in which a warpgroup reads or writes whole rows, 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def _places(
    base, head, q_start, q_len, stride_t, stride_h, GROUP: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Returns the offsets [ROWS, D] of pairs from `base` on, and a mask of the pairs that exist."""
    layout: gl.constexpr = _lines(D)
    flat = base + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    tokens = (q_start + flat // GROUP).to(gl.int64)
    heads = head * GROUP + flat % GROUP
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    at = (tokens * stride_t + heads * stride_h)[:, None] + dims[None, :]
    return at, (flat < q_len * GROUP)[:, None]


@gluon.jit
def ask_queries(
    q_ptr, q, base, head, q_start, q_len, stride_t, stride_h,
    GROUP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Starts the load of a warpgroup's queries. Pairs that do not exist become zeros."""
    at, inside = _places(base, head, q_start, q_len, stride_t, stride_h, GROUP, D)
    copy_async(q, q_ptr + at, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _in_fp16(q, D: gl.constexpr):
    """Converts queries to fp16 in place, and returns them.

    Each thread reads and writes the values that it has loaded itself."""
    x = gl.minimum(gl.maximum(q.load(_lines(D)).to(gl.float32), -65504.0), 65504.0)
    q = reinterpret(q, gl.float16, [ROWS, D], q.layout)
    q.store(x.to(gl.float16))
    return q


@gluon.jit
def _clear_tail(
    v_tiles, stage, position, end, BN: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr
):  # fmt: skip
    """Zeroes a stage's values from position `end` on.

    Values past the end may be NaN, and NaN times a weight of zero is NaN. Both warpgroups write the
    same zeros."""
    PAGES: gl.constexpr = BN // PAGE
    PARTS: gl.constexpr = D // COLUMNS
    PIECES: gl.constexpr = v_tiles.shape[0] * PARTS * PAGES
    pages = reinterpret(v_tiles, v_tiles.dtype, [PIECES, PAGE, COLUMNS], v_tiles.layout)
    layout: gl.constexpr = _lines(COLUMNS)
    rows = gl.arange(0, PAGE, layout=gl.SliceLayout(1, layout))
    for page in range((end - position) // PAGE, PAGES):
        stored = position + page * PAGE + rows < end
        for part in gl.static_range(PARTS):
            values = pages.index((stage * PARTS + part) * PAGES + page)
            x = values.load(layout)
            values.store(gl.where(stored[:, None], x, gl.zeros_like(x)))
    fence_async_shared()
    barrier()


@gluon.jit
def _weigh(
    scores, peak, total, limit, position, numbers,
    MASKED: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """Returns the weights of scores [ROWS, BN], the factor of earlier sums, the new peak and the
    new total."""
    qk_scale, softcap, window = numbers
    factor = qk_scale
    if SOFTCAP:
        grown = 1.0 + gl.exp2(scores * (-LOG2E * qk_scale))
        inverse = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [grown], dtype=gl.float32, is_pure=True, pack=1
        )
        scores = 2.0 * inverse - 1.0
        factor = softcap
    if MASKED:
        columns = gl.arange(0, BN, layout=gl.SliceLayout(0, sums_layout(BN)))
        ahead = (limit - position)[:, None]
        seen = columns[None, :] <= ahead
        if WINDOW:
            seen = seen & (columns[None, :] > ahead - window)
        scores = gl.where(seen, scores, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, 1) * factor)
    base = higher
    if MASKED or WINDOW:
        base = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(scores * factor - base[:, None])
    decay = gl.exp2(peak - base)
    total = total * decay + gl.sum(weights, 1)
    return weights.to(dtype), decay, higher, total


@gluon.jit
def _ask_scores(q, k_tiles, stage, BN: gl.constexpr):
    nothing = gl.zeros([ROWS, BN], gl.float32, layout=sums_layout(BN))
    k = k_tiles.index(stage).permute((1, 0))
    return warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)


@gluon.jit
def _attend_range(
    acc, weights, peak, total, start, until, end, q, rings, limit, top, numbers,
    MASKED: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, BN: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Computes attention over the ring's tiles [start, until). Tile i begins at position
    top - i * BN.

    While one tile's weights are computed, the previous tile's weights are multiplied by its values.
    So the argument `weights` belongs to tile start - 1, and the returned weights to tile until - 1.
    `end` is the number of KV tiles of these queries."""
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, sums_layout(D), 2)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, sums_layout(D))
    k_tiles, v_tiles, full_k, full_v, empty_k, empty_v = rings
    for i in range(start, until):
        stage = i % STAGES
        before = (i - 1) % STAGES
        scores = _ask_scores(q, k_tiles, stage, BN)
        mbarrier.wait(full_v.index(before), ((i - 1) // STAGES) & 1)
        acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(empty_k.index(stage), count=1)
        ahead, decay, peak, total = _weigh(
            scores, peak, total, limit, top - i * BN, numbers,
            MASKED, SOFTCAP, WINDOW, BN, weights.dtype,
        )  # fmt: skip
        # This wait must be here and not where the tile is used. The assembler moves
        # arithmetic across waits for products, but not across loops. Without the wait it
        # would compute the weights only after the product had ended.
        mbarrier.wait(full_k.index((i + 1) % STAGES), ((i + 1) // STAGES) & 1, pred=i + 1 < end)
        acc, weights, ahead = warpgroup_mma_wait(
            0, deps=[acc, weights, gl.convert_layout(ahead, P_LAYOUT)]
        )
        mbarrier.arrive(empty_v.index(before), count=1)
        acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
        weights = ahead
    return acc, weights, peak, total


@gluon.jit
def attend_tiles(
    out_ptr, sinks_ptr, q, rings, base, item, done, numbers, stride_t, stride_h,
    GROUP: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr,
    CLEAN: gl.constexpr,
):  # fmt: skip
    """Attends for ROWS pairs of an item, from `base` on.

    The queries are in the second to last group of asynchronous copies.

    Args:
        done: number of KV tiles that the rings held for earlier items.
        CLEAN: tiles contain no NaN past the stored positions.
    """
    S_ROWS: gl.constexpr = gl.SliceLayout(1, sums_layout(BN))
    O_LAYOUT: gl.constexpr = sums_layout(D)
    k_tiles, v_tiles, full_k, full_v, empty_k, empty_v = rings
    dtype: gl.constexpr = k_tiles.dtype
    out_dtype: gl.constexpr = out_ptr.dtype.element_ty
    head, _, _, q_start, q_len, length, first, last, _, low, count = item
    flat = base + gl.arange(0, ROWS, layout=S_ROWS)
    limit = gl.where(flat < q_len * GROUP, length - q_len + flat // GROUP, -1)
    if SINKS:
        peak = gl.load(sinks_ptr + head * GROUP + flat % GROUP).to(gl.float32) * LOG2E
        total = gl.full([ROWS], 1.0, gl.float32, layout=S_ROWS)
    else:
        peak = gl.full([ROWS], float("-inf"), gl.float32, layout=S_ROWS)
        total = gl.zeros([ROWS], gl.float32, layout=S_ROWS)
    end = done + count
    top = (low + end - 1) * BN
    # Some queries see only a part of the last tiles, and with a window of the first ones.
    masked_to = gl.minimum(gl.maximum(low + end - (first + 1) // BN, done + 1), end)
    whole_to = end
    if WINDOW:
        whole_from = (gl.maximum(last - numbers[2] + 1, 0) + BN - 1) // BN
        whole_to = gl.minimum(gl.maximum(low + end - whole_from, masked_to), end)
    stage = done % STAGES
    phase = (done // STAGES) & 1
    async_copy.wait_group(1)
    out_tile = q
    if dtype != out_dtype:
        q = _in_fp16(q, D)
    fence_async_shared()
    barrier()
    mbarrier.wait(full_k.index(stage), phase)
    scores = warpgroup_mma_wait(0, deps=[_ask_scores(q, k_tiles, stage, BN)])
    mbarrier.arrive(empty_k.index(stage), count=1)
    position = top - done * BN
    weights, _, peak, total = _weigh(
        scores, peak, total, limit, position, numbers, True, SOFTCAP, WINDOW, BN, dtype
    )
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, O_LAYOUT, 2))
    if not CLEAN:
        if position + BN > length:
            mbarrier.wait(full_v.index(stage), phase)
            _clear_tail(v_tiles, stage, position, length, BN, D, PAGE)
    mbarrier.wait(full_k.index((done + 1) % STAGES), ((done + 1) // STAGES) & 1, pred=count > 1)
    acc = gl.zeros([ROWS, D], gl.float32, layout=O_LAYOUT)
    acc, weights, peak, total = _attend_range(
        acc, weights, peak, total, done + 1, masked_to, end, q, rings, limit, top, numbers,
        True, SOFTCAP, WINDOW, BN, D, STAGES,
    )  # fmt: skip
    acc, weights, peak, total = _attend_range(
        acc, weights, peak, total, masked_to, whole_to, end, q, rings, limit, top, numbers,
        False, SOFTCAP, WINDOW, BN, D, STAGES,
    )  # fmt: skip
    if WINDOW:
        acc, weights, peak, total = _attend_range(
            acc, weights, peak, total, whole_to, end, end, q, rings, limit, top, numbers,
            True, SOFTCAP, WINDOW, BN, D, STAGES,
        )  # fmt: skip
    stage = (end - 1) % STAGES
    mbarrier.wait(full_v.index(stage), ((end - 1) // STAGES) & 1)
    acc = warpgroup_mma(weights, v_tiles.index(stage), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(empty_v.index(stage), count=1)
    total = gl.where(total > 0.0, total, 1.0)
    acc = acc * gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))[:, None]
    # The result goes through the queries' shared memory, so that whole rows are written.
    out_tile.store(acc.to(out_dtype))
    barrier()
    at, inside = _places(base, head, q_start, q_len, stride_t, stride_h, GROUP, D)
    gl.store(out_ptr + at, out_tile.load(_lines(D)), mask=inside)
    barrier()
