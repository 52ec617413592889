"""Kernels of `attention.py`: tiles of queries against a paged KV cache.

A tile packs BM (token, query head) pairs that share a KV head, as flat index
`token * GROUP + head`, so that any group size fills it: grouped decode queries meet in one matrix
product, and prefill wastes nothing on groups that are no power of two. The online softmax is that
of FlashAttention-2 (Dao, 2023), split-KV with a combine that of Flash-Decoding (Dao et al., 2023),
pages are those of PagedAttention (Kwon et al., 2023).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROWS_AT_ONCE = tl.constexpr(256)
PARTS_AT_ONCE = tl.constexpr(4)


@triton.jit
def _row_of_tile(tile, query_start_ptr, num_rows, GROUP: tl.constexpr, BM: tl.constexpr):
    """The row that owns a tile, and the row's first tile. Row r starts at tile
    `query_start[r] * GROUP // BM + r`: at least as many tiles apart as the rows need, so the grid's
    size follows from the token and row buckets alone."""
    row = -1
    for start in range(0, num_rows, ROWS_AT_ONCE):
        rows = start + tl.arange(0, ROWS_AT_ONCE)
        first = tl.load(query_start_ptr + rows, mask=rows < num_rows, other=0)
        first = first * GROUP // BM + rows
        row += tl.sum(((first <= tile) & (rows < num_rows)).to(tl.int32), 0)
    first_tile = tl.load(query_start_ptr + row) * GROUP // BM + row
    return row, first_tile


@triton.jit
def _window_start(first_position, window, WINDOW: tl.constexpr, BN: tl.constexpr):
    """The first KV position that counts, rounded down so that tiles lie at absolute positions."""
    if WINDOW:
        return tl.maximum(first_position - window + 1, 0) // BN * BN
    else:
        return first_position * 0


@triton.jit
def _stored(positions, begin, end):
    return (positions >= begin) & (positions < end)


@triton.jit
def _attend_range(
    acc, peak, total, q, limit, start, end, begin, k_ptr, v_ptr, table_ptr, qk_scale,
    softcap, window, k_stride_b, k_stride_t, v_stride_b, v_stride_t,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over KV tiles [start, end). Only MASKED tiles check positions: causality
    (`limit` is each query's position) and the window; what lies outside [begin, end) belongs to
    none of the queries, may not be stored (any more), and is not read.
    `peak` and `total` are the running maximum (in log2 units) and sum."""
    dims = tl.arange(0, D_PAD)
    # Block ids are fetched a tile ahead, else each tile's loads would wait for them.
    positions = start + tl.arange(0, BN)
    page = tl.load(table_ptr + positions // PAGE, mask=_stored(positions, begin, end), other=0)
    for tile in range(start, end, BN):
        positions = tile + tl.arange(0, BN)
        k_rows = page.to(tl.int64) * k_stride_b + (positions % PAGE) * k_stride_t
        v_rows = page.to(tl.int64) * v_stride_b + (positions % PAGE) * v_stride_t
        ahead = positions + BN
        page = tl.load(table_ptr + ahead // PAGE, mask=_stored(ahead, begin, end), other=0)
        k_at = k_ptr + k_rows[:, None] + dims[None, :]
        v_at = v_ptr + v_rows[:, None] + dims[None, :]
        if MASKED:
            inside = _stored(positions, begin, end)[:, None] & (dims[None, :] < HEAD_DIM)
            k = tl.load(k_at, mask=inside, other=0.0)
            v = tl.load(v_at, mask=inside, other=0.0)
        elif HEAD_DIM == D_PAD:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=dims[None, :] < HEAD_DIM, other=0.0)
            v = tl.load(v_at, mask=dims[None, :] < HEAD_DIM, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        factor = qk_scale
        if SOFTCAP:
            # cap * tanh(x / cap): qk_scale is then 2 * scale / cap, and the cap in log2 units.
            scores = 2.0 * tl.sigmoid(scores * qk_scale) - 1.0
            factor = softcap
        if MASKED:
            seen = positions[None, :] <= limit[:, None]
            if WINDOW:
                seen = seen & (positions[None, :] > limit[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        # Scaled after the maximum, so that the scaling is part of the exponent's multiply-add.
        higher = tl.maximum(peak, tl.max(scores, 1) * factor)
        base = higher
        if MASKED:
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * factor - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = higher
    return acc, peak, total


@triton.jit
def _load_queries(
    q_ptr, head, local, q_start, q_len, first, stride_t, stride_h,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BM: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Queries of a row's tile `local`: their values [BM, D_PAD], absolute positions [BM] (-1 for
    what is none), tokens and heads [BM]. The row's first query stands at position `first`."""
    flat = local * BM + tl.arange(0, BM)
    live = flat < q_len * GROUP
    tokens = flat // GROUP
    heads = head * GROUP + flat % GROUP
    dims = tl.arange(0, D_PAD)
    inside = live[:, None] & (dims[None, :] < HEAD_DIM)
    rows = (q_start + tokens).to(tl.int64) * stride_t + heads * stride_h
    q = tl.load(q_ptr + rows[:, None] + dims[None, :], mask=inside, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    return q, tl.where(live, first + tokens, -1), q_start + tokens, heads


@triton.jit
def _store_output(
    out_ptr, result, tokens, heads, live, stride_t, stride_h,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, D_PAD)
    rows = tokens.to(tl.int64) * stride_t + heads * stride_h
    inside = live[:, None] & (dims[None, :] < HEAD_DIM)
    at = out_ptr + rows[:, None] + dims[None, :]
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _prefetch(
    k_ptr, v_ptr, table_ptr, start, end, k_stride_b, k_stride_t, v_stride_b, v_stride_t,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Ask for the KV of positions [start, min(end, start + BN)) to be brought into L2."""
    LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (HEAD_DIM + LINE - 1) // LINE
    positions = tl.minimum(start + tl.arange(0, BN), end - 1)
    page = tl.load(table_ptr + positions // PAGE).to(tl.int64)
    k_rows = k_ptr + page * k_stride_b + (positions % PAGE) * k_stride_t
    v_rows = v_ptr + page * v_stride_b + (positions % PAGE) * v_stride_t
    for line in tl.static_range(LINES):
        for rows in tl.static_range(2):
            at = (k_rows if rows == 0 else v_rows) + line * LINE
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [at],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def _merge(
    partial_ptr, lse_ptr, base, parts, part_stride, live,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The parts' results [BM, D_PAD], weighted by their sums, in order. Read past L1, which does
    not see what other programs wrote."""
    ROWS: tl.constexpr = PARTS_AT_ONCE * BM
    dims = tl.arange(0, D_PAD)
    flat = tl.arange(0, ROWS)
    wanted = tl.sum(tl.where(live, 1, 0), 0)
    acc = tl.zeros([BM, D_PAD], tl.float32)
    total = tl.zeros([BM], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    for start in range(0, parts, PARTS_AT_ONCE):
        part = start + flat // BM
        inside = (part < parts) & (flat % BM < wanted)
        at = base + part.to(tl.int64) * part_stride + flat % BM
        lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            partial_ptr + at[:, None] * HEAD_DIM + dims[None, :],
            mask=inside[:, None] & (dims[None, :] < HEAD_DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        lse = tl.reshape(lse, [PARTS_AT_ONCE, BM])
        higher = tl.maximum(peak, tl.max(lse, 0))
        # A window can leave a query nothing in its first parts.
        floor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(lse - floor[None, :])
        decay = tl.exp2(peak - floor)
        total = total * decay + tl.sum(weights, 0)
        weighted = tl.reshape(values, [PARTS_AT_ONCE, BM, D_PAD]) * weights[:, :, None]
        acc = acc * decay[:, None] + tl.sum(weighted, 0)
        peak = higher
    return acc / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["num_items", "window"])
def attend_short(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, counters_ptr, items_ptr, table_ptr,
    num_items, qk_scale, softcap, window, q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Rows whose queries fit one tile. Grid (KV heads, items); an item is a range of a row's KV
    positions, see `attention_schedule`. Of a row in several parts, the last to arrive adds up."""
    head = tl.program_id(0)
    item = items_ptr + tl.program_id(1)
    row = tl.load(item)
    start = tl.load(item + num_items)
    end = tl.load(item + 2 * num_items)
    leader = tl.load(item + 3 * num_items)
    parts = tl.load(item + 4 * num_items)
    q_start = tl.load(item + 5 * num_items)
    q_len = tl.load(item + 6 * num_items)
    first = tl.load(item + 7 * num_items)
    k_ptr += head.to(tl.int64) * k_stride_h
    v_ptr += head.to(tl.int64) * v_stride_h
    table_ptr += row.to(tl.int64) * table_stride
    if PDL:
        if PREFETCH and (row >= 0) & (start < first):
            # What earlier steps stored does not wait for this one.
            _prefetch(
                k_ptr, v_ptr, table_ptr, start, tl.minimum(first, end),
                k_stride_b, k_stride_t, v_stride_b, v_stride_t, HEAD_DIM, PAGE, BN,
            )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()
    if row < 0:
        return
    q, limit, tokens, heads = _load_queries(
        q_ptr, head, 0, q_start, q_len, first, q_stride_t, q_stride_h,
        GROUP, HEAD_DIM, D_PAD, BM, UPCAST,
    )  # fmt: skip
    live = limit >= 0
    begin = 0
    if WINDOW:
        begin = first - window + 1
    # One masked loop: two would drain the pipeline in between, and decode is all pipeline.
    acc, peak, total = _attend_range(
        tl.zeros([BM, D_PAD], tl.float32), tl.full([BM], float("-inf"), tl.float32),
        tl.zeros([BM], tl.float32), q, limit, start, end, begin, k_ptr, v_ptr, table_ptr, qk_scale,
        softcap, window, k_stride_b, k_stride_t, v_stride_b, v_stride_t,
        HEAD_DIM, D_PAD, PAGE, BN, True, SOFTCAP, WINDOW, UPCAST, PRECISION,
    )  # fmt: skip
    # A part may hold nothing for some of its queries: their sum is 0, their peak -inf.
    total = tl.where(total > 0.0, total, 1.0)
    result = acc / total[:, None]
    last = True
    if parts > 1:
        dims = tl.arange(0, D_PAD)
        part_stride = tl.num_programs(0) * BM
        base = leader.to(tl.int64) * part_stride + head * BM
        at = tl.program_id(1).to(tl.int64) * part_stride + head * BM + tl.arange(0, BM)
        inside = live[:, None] & (dims[None, :] < HEAD_DIM)
        tl.store(partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
        tl.store(lse_ptr + at, peak + tl.log2(total), mask=live)
        tl.debug_barrier()  # every thread's part is written before the one atomic that says so
        counter = counters_ptr + leader * tl.num_programs(0) + head
        last = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
        if last:
            result = _merge(
                partial_ptr, lse_ptr, base, parts, part_stride, live, HEAD_DIM, D_PAD, BM
            )
            tl.store(counter, 0)  # for the next layer
    if last:
        _store_output(
            out_ptr, result, tokens, heads, live, out_stride_t, out_stride_h, HEAD_DIM, D_PAD
        )


@triton.jit(do_not_specialize=["num_rows", "window"])
def attend_long(
    q_ptr, k_ptr, v_ptr, out_ptr, query_start_ptr, seq_lens_ptr, table_ptr,
    num_rows, qk_scale, softcap, window, q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SHORTEST: tl.constexpr, ONE_LOOP: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows of at least SHORTEST queries. Grid (KV heads, tiles). ONE_LOOP: every KV tile takes the
    masked road; a query's rounding then does not depend on its neighbours in the tile."""
    head = tl.program_id(0)
    # The last tiles of a causal prompt are the longest: start them first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row, first_tile = _row_of_tile(tile, query_start_ptr, num_rows, GROUP, BM)
    local = tile - first_tile
    q_start = tl.load(query_start_ptr + row)
    q_len = tl.load(query_start_ptr + row + 1) - q_start
    seq_len = tl.load(seq_lens_ptr + row)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if (q_len < SHORTEST) | (local * BM >= q_len * GROUP):
        return
    q, limit, tokens, heads = _load_queries(
        q_ptr, head, local, q_start, q_len, seq_len - q_len, q_stride_t, q_stride_h,
        GROUP, HEAD_DIM, D_PAD, BM, UPCAST,
    )  # fmt: skip
    first = seq_len - q_len + local * BM // GROUP
    last = seq_len - q_len + tl.minimum((local * BM + BM - 1) // GROUP, q_len - 1)
    begin = 0
    if WINDOW:
        begin = first - window + 1
    lo = _window_start(first, window, WINDOW, BN)
    k_ptr += head.to(tl.int64) * k_stride_h
    v_ptr += head.to(tl.int64) * v_stride_h
    table_ptr += row.to(tl.int64) * table_stride
    acc = tl.zeros([BM, D_PAD], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    # Tiles that every query sees whole, between those that must be masked.
    whole_from = lo
    whole_to = lo
    if not ONE_LOOP:
        whole_to = tl.maximum((first + 1) // BN * BN, lo)
        if WINDOW:
            whole_from = tl.cdiv(tl.maximum(last - window + 1, 0), BN) * BN
            whole_from = tl.minimum(tl.maximum(whole_from, lo), whole_to)
            acc, peak, total = _attend_range(
                acc, peak, total, q, limit, lo, whole_from, begin, k_ptr, v_ptr, table_ptr,
                qk_scale, softcap, window, k_stride_b, k_stride_t, v_stride_b, v_stride_t,
                HEAD_DIM, D_PAD, PAGE, BN, True, SOFTCAP, WINDOW, UPCAST, PRECISION,
            )  # fmt: skip
        acc, peak, total = _attend_range(
            acc, peak, total, q, limit, whole_from, whole_to, begin, k_ptr, v_ptr, table_ptr,
            qk_scale, softcap, window, k_stride_b, k_stride_t, v_stride_b, v_stride_t,
            HEAD_DIM, D_PAD, PAGE, BN, False, SOFTCAP, WINDOW, UPCAST, PRECISION,
        )  # fmt: skip
    acc, peak, total = _attend_range(
        acc, peak, total, q, limit, whole_to, last + 1, begin, k_ptr, v_ptr, table_ptr, qk_scale,
        softcap, window, k_stride_b, k_stride_t, v_stride_b, v_stride_t,
        HEAD_DIM, D_PAD, PAGE, BN, True, SOFTCAP, WINDOW, UPCAST, PRECISION,
    )  # fmt: skip
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    _store_output(
        out_ptr, result, tokens, heads, limit >= 0, out_stride_t, out_stride_h, HEAD_DIM, D_PAD
    )
