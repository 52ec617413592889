"""Kernels of `attention.py`: one tile of queries against a paged KV cache, and the combine step.

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
SPLITS_AT_ONCE = tl.constexpr(8)


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
def _splits(lo, hi, num_splits, BN: tl.constexpr, MIN_TILES: tl.constexpr):
    """(positions per split, splits that have work) for KV positions [lo, hi)."""
    tiles = tl.cdiv(hi - lo, BN)
    per_split = tl.maximum(tl.cdiv(tiles, num_splits), MIN_TILES)
    return per_split * BN, tl.cdiv(tiles, per_split)


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


@triton.jit(do_not_specialize=["num_rows", "window"])
def attend(
    q_ptr, k_ptr, v_ptr, out_ptr, partial_ptr, lse_ptr, query_start_ptr, seq_lens_ptr, table_ptr,
    num_rows, qk_scale, softcap, window, q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MIN_Q: tl.constexpr, MAX_Q: tl.constexpr,
    SPLIT: tl.constexpr, MIN_TILES: tl.constexpr, ONE_LOOP: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (KV heads, tiles, splits). Rows with MIN_Q <= q_len <= MAX_Q are computed (MAX_Q 0: no
    bound), others belong to another launch. MAX_Q * GROUP <= BM means one tile per row, and the
    tile index is the row. ONE_LOOP: every KV tile takes the masked road; a query's rounding then
    does not depend on its neighbours in the tile."""
    head = tl.program_id(0)
    tile = tl.program_id(1)
    if MAX_Q > 0:
        row = tile
        local = 0
    else:
        # The last tiles of a causal prompt are the longest: start them first.
        tile = tl.num_programs(1) - 1 - tile
        row, first_tile = _row_of_tile(tile, query_start_ptr, num_rows, GROUP, BM)
        local = tile - first_tile
    q_start = tl.load(query_start_ptr + row)
    q_len = tl.load(query_start_ptr + row + 1) - q_start
    seq_len = tl.load(seq_lens_ptr + row)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if (q_len < MIN_Q) | (local * BM >= q_len * GROUP):
        return
    if MAX_Q > 0:
        if q_len > MAX_Q:
            return

    flat = local * BM + tl.arange(0, BM)
    live = flat < q_len * GROUP
    tokens = flat // GROUP
    first = seq_len - q_len + local * BM // GROUP
    last = seq_len - q_len + tl.minimum((local * BM + BM - 1) // GROUP, q_len - 1)
    limit = tl.where(live, seq_len - q_len + tokens, -1)
    hi = last + 1
    begin = 0
    if WINDOW:
        begin = first - window + 1
    lo = _window_start(first, window, WINDOW, BN)
    used = 1
    split = 0
    if SPLIT:
        split = tl.program_id(2)
        span, used = _splits(lo, hi, tl.num_programs(2), BN, MIN_TILES)
        if split >= used:
            return
        lo += split * span
        hi = tl.minimum(hi, lo + span)

    dims = tl.arange(0, D_PAD)
    heads = head * GROUP + flat % GROUP
    inside = live[:, None] & (dims[None, :] < HEAD_DIM)
    q_rows = (q_start + tokens).to(tl.int64) * q_stride_t + heads * q_stride_h
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=inside, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    k_ptr += head.to(tl.int64) * k_stride_h
    v_ptr += head.to(tl.int64) * v_stride_h
    table_ptr += row.to(tl.int64) * table_stride
    acc = tl.zeros([BM, D_PAD], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)

    whole_from = lo
    whole_to = lo
    if not ONE_LOOP:
        whole_to = tl.maximum((first + 1) // BN * BN, lo)
        if SPLIT:
            whole_to = tl.minimum(whole_to, hi)
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
        acc, peak, total, q, limit, whole_to, hi, begin, k_ptr, v_ptr, table_ptr, qk_scale,
        softcap, window, k_stride_b, k_stride_t, v_stride_b, v_stride_t,
        HEAD_DIM, D_PAD, PAGE, BN, True, SOFTCAP, WINDOW, UPCAST, PRECISION,
    )  # fmt: skip

    # A split may hold nothing for some of its queries: their sum is 0, their peak -inf.
    total = tl.where(total > 0.0, total, 1.0)
    result = acc / total[:, None]
    parts = tl.where(live, used, 0)
    stored = dims[None, :] < HEAD_DIM
    if SPLIT:
        part = (row * tl.num_programs(0) + head).to(tl.int64) * tl.num_programs(2) + split
        part = part * BM + tl.arange(0, BM)
        part_at = partial_ptr + part[:, None] * HEAD_DIM + dims[None, :]
        tl.store(part_at, result, mask=stored & (parts > 1)[:, None])
        tl.store(lse_ptr + part, peak + tl.log2(total), mask=parts > 1)
    out_rows = (q_start + tokens).to(tl.int64) * out_stride_t + heads * out_stride_h
    out_at = out_ptr + out_rows[:, None] + dims[None, :]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=stored & (parts == 1)[:, None])


@triton.jit(do_not_specialize=["num_splits", "window"])
def combine(
    partial_ptr, lse_ptr, out_ptr, query_start_ptr, seq_lens_ptr, num_splits, window,
    out_stride_t, out_stride_h,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, MAX_Q: tl.constexpr, MIN_TILES: tl.constexpr, WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, KV heads, queries of a tile): the splits' results, weighted by their sums."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    flat = tl.program_id(2)
    q_start = tl.load(query_start_ptr + row)
    q_len = tl.load(query_start_ptr + row + 1) - q_start
    seq_len = tl.load(seq_lens_ptr + row)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if (flat >= q_len * GROUP) | (q_len > MAX_Q):
        return
    lo = _window_start(seq_len - q_len, window, WINDOW, BN)
    _, used = _splits(lo, seq_len, num_splits, BN, MIN_TILES)
    if used <= 1:
        return
    dims = tl.arange(0, D_PAD)
    base = (row * tl.num_programs(1) + head).to(tl.int64) * num_splits
    acc = tl.zeros([D_PAD], tl.float32)
    total = 0.0
    peak = float("-inf")
    for start in range(0, used, SPLITS_AT_ONCE):
        split = start + tl.arange(0, SPLITS_AT_ONCE)
        part = (base + split) * BM + flat
        lse = tl.load(lse_ptr + part, mask=split < used, other=float("-inf"))
        inside = (split[:, None] < used) & (dims[None, :] < HEAD_DIM)
        values_at = partial_ptr + part[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(values_at, mask=inside, other=0.0)
        higher = tl.maximum(peak, tl.max(lse, 0))
        # A window can leave a query nothing in its first splits.
        floor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(lse - floor)
        decay = tl.exp2(peak - floor)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * values, 0)
        peak = higher
    out_row = (q_start + flat // GROUP).to(tl.int64) * out_stride_t
    out_at = out_ptr + out_row + (head * GROUP + flat % GROUP) * out_stride_h + dims
    tl.store(out_at, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
