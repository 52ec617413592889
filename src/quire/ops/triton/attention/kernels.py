"""Kernels of `attention.py`: tiles of queries against a paged KV cache.

A tile packs BM (token, query head) pairs that share a KV head. Pair `token * GROUP + head` fills
the tile without gaps for any group size, so decode queries of a group share one matrix product, and
prefill wastes no rows if the group size is not a power of two. The online softmax follows
FlashAttention-2 (Dao, 2023). Split-KV with a combine step follows Flash-Decoding (Dao et al.,
2023), and pages follow PagedAttention (Kwon et al., 2023)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.attention import tiles

ROWS_AT_ONCE = tl.constexpr(256)
PARTS_AT_ONCE = tl.constexpr(8)
SCALES = ["k_scale_ptr", "v_scale_ptr"]
"""Arguments whose alignment differs between layers. It is ignored, so that kernels compile once."""


@triton.jit
def row_of_tile(tile, query_start_ptr, num_rows, GROUP: tl.constexpr, BM: tl.constexpr):
    """Returns the row that owns a tile, and the row's first tile.

    Row r starts at tile `query_start[r] * GROUP // BM + r`. So each row has at least as many tiles
    as it needs, and the size of the grid follows from the token and row buckets."""
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
    """Returns the first KV position that a query sees, rounded down to a multiple of BN."""
    if WINDOW:
        return tl.maximum(first_position - window + 1, 0) // BN * BN
    else:
        return first_position * 0


@triton.jit
def _prefetch(
    k_ptr, v_ptr, table_ptr, start, end, k_stride_b, k_stride_t, v_stride_b, v_stride_t,
    HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Prefetches the KV of positions [start, min(end, start + BN)) into L2."""
    LINE: tl.constexpr = 1024 // k_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (HEAD_DIM + LINE - 1) // LINE
    positions = tl.minimum(start + tl.arange(0, BN), end - 1)
    block = tl.load(table_ptr + positions // BLOCK_TOKENS).to(tl.int64)
    k_rows = k_ptr + block * k_stride_b + (positions % BLOCK_TOKENS) * k_stride_t
    v_rows = v_ptr + block * v_stride_b + (positions % BLOCK_TOKENS) * v_stride_t
    for line in tl.static_range(LINES):
        for k_or_v in tl.static_range(2):
            at = (k_rows if k_or_v == 0 else v_rows) + line * LINE
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [at],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=SCALES)
def attend_short(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, out_ptr, partial_ptr, lse_ptr,
    items_ptr, table_ptr, qk_scale, softcap, window, q_stride_t, q_stride_h, out_stride_t,
    out_stride_h, k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    scale_stride_b, scale_stride_h, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, OWN_SCALES: tl.constexpr,
    PACKED: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Attends for rows whose queries fit one tile.

    Grid: (KV heads, items). An item is a range of a row's KV positions, see `Schedule`. With PARTS
    a row may have several items, which `combine` adds."""
    # Kernels count KV in elements: a value, or a pair of 8-bit values.
    WIDTH: tl.constexpr = HEAD_DIM // 2 if KIND else HEAD_DIM
    W_PAD: tl.constexpr = D_PAD // 2 if KIND else D_PAD
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    item = items_ptr + tl.program_id(1) * 8
    row = tl.load(item)
    start = tl.load(item + 1)
    end = tl.load(item + 2)
    q_start = tl.load(item + 3)
    q_len = tl.load(item + 4)
    first = tl.load(item + 5)
    if PDL:
        # Programs without work leave their registers to the next kernels. The first item's programs
        # wait, so that the kernel does not end before its predecessor.
        if (row < 0) & (tl.program_id(1) > 0):
            return
    parts = 1
    if PARTS:
        parts = tl.load(item + 6)
    k_ptr += head.to(tl.int64) * k_stride_h
    v_ptr += head.to(tl.int64) * v_stride_h
    qk_scale = tiles.score_scale(qk_scale, k_scale_ptr, head, KIND, OWN_SCALES)
    if OWN_SCALES:
        k_scale_ptr += head.to(tl.int64) * scale_stride_h
        v_scale_ptr += head.to(tl.int64) * scale_stride_h
    table_ptr += row.to(tl.int64) * table_stride
    if PDL:
        if PREFETCH and (row >= 0) & (start < first):
            # KV of earlier steps may be read before the preceding kernel has stored this step's.
            _prefetch(
                k_ptr, v_ptr, table_ptr, start, tl.minimum(first, end),
                k_stride_b, k_stride_t, v_stride_b, v_stride_t, WIDTH, BLOCK_TOKENS, BN,
            )  # fmt: skip
        gdc_wait()
    if row < 0:
        return
    q, limit = tiles.load_queries(
        q_ptr, head, 0, q_start, q_len, first, q_stride_t, q_stride_h,
        GROUP, WIDTH, W_PAD, BM, UPCAST, KIND,
    )  # fmt: skip
    begin = 0
    if WINDOW:
        begin = first - window + 1
    # There is one loop, with a mask. Two loops would drain the load pipeline in between, which
    # bounds the speed of decode.
    acc, peak, total = tiles.init_accumulators(BM, W_PAD, KIND)
    if SINKS:
        alone = q_len > 0
        if PARTS:
            alone = parts == 1
        peak, total = tiles.with_sinks(peak, total, sinks_ptr, head, 0, alone, GROUP, BM)
    acc, peak, total = tiles.attend_range(
        acc, peak, total, q, limit, start, end, begin, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
        table_ptr, qk_scale, softcap, window,
        k_stride_b, k_stride_t, v_stride_b, v_stride_t, scale_stride_b,
        WIDTH, W_PAD, BLOCK_TOKENS, BN, True, SOFTCAP, WINDOW, UPCAST, PRECISION,
        KIND, OWN_SCALES, PACKED,
    )  # fmt: skip
    # A query that sees no KV of the part has a peak of -inf.
    result, total = tiles.average(acc, total, v_scale_ptr, head, KIND, OWN_SCALES)
    if PARTS:
        lse = peak + tl.log2(total)
        tiles.store_part(partial_ptr, lse_ptr, result, lse, limit, parts, HEAD_DIM, D_PAD, BM)
        # `combine` writes rows of several parts.
        q_len = tl.where(parts > 1, 0, q_len)
    tiles.store_output(
        out_ptr, result, head, 0, q_start, q_len, out_stride_t, out_stride_h,
        GROUP, HEAD_DIM, D_PAD, BM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def combine(
    partial_ptr, lse_ptr, sinks_ptr, out_ptr, items_ptr, rows_ptr, num_rows, out_stride_t,
    out_stride_h, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    BM: tl.constexpr, SINKS: tl.constexpr, LONG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds the results of a query's parts, weighted by their sums.

    Grid: (rows, KV heads, queries of a tile). With LONG it is (tokens, KV heads, GROUP), and
    `rows_ptr` is `LongSchedule.places`."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1)
    flat = tl.program_id(2)
    place = flat
    leader = tl.load(rows_ptr + row)
    parts = tl.load(rows_ptr + num_rows + row)
    if LONG:
        q_start = tl.load(rows_ptr + 2 * num_rows + row)
        flat += (row - q_start) * GROUP
        leader += flat // BM * parts
        place = flat % BM
        live = parts > 1
    else:
        q_start = tl.load(items_ptr + leader * 8 + 3, mask=parts > 1, other=0)
        q_len = tl.load(items_ptr + leader * 8 + 4, mask=parts > 1, other=0)
        live = (parts > 1) & (flat < q_len * GROUP)
    if PDL:
        gdc_wait()
    if not live:
        return
    dims = tl.arange(0, D_PAD)
    base = leader.to(tl.int64) * tl.num_programs(1) + head
    acc = tl.zeros([D_PAD], tl.float32)
    total = 0.0
    peak = float("-inf")
    if SINKS:
        peak = tiles.sink(sinks_ptr, head * GROUP + flat % GROUP)
        total = 1.0
    for start in range(0, parts, PARTS_AT_ONCE):
        part = start + tl.arange(0, PARTS_AT_ONCE)
        at = (base + part * tl.num_programs(1)) * BM + place
        lse = tl.load(lse_ptr + at, mask=part < parts, other=float("-inf"))
        inside = (part[:, None] < parts) & (dims[None, :] < HEAD_DIM)
        values_at = partial_ptr + at[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(values_at, mask=inside, other=0.0)
        higher = tl.maximum(peak, tl.max(lse, 0))
        # With a window, a query may see nothing of its first parts.
        floor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(lse - floor)
        decay = tl.exp2(peak - floor)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * values, 0)
        peak = higher
    out_row = (q_start + flat // GROUP).to(tl.int64) * out_stride_t
    out_at = out_ptr + out_row + (head * GROUP + flat % GROUP) * out_stride_h + dims
    tl.store(out_at, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=["num_rows", "window"], do_not_specialize_on_alignment=SCALES)
def attend_long(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, sinks_ptr, out_ptr, partial_ptr, lse_ptr,
    items_ptr, query_start_ptr, seq_lens_ptr, table_ptr, num_rows, qk_scale, softcap, window,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    k_stride_b, k_stride_h, k_stride_t, v_stride_b, v_stride_h, v_stride_t,
    scale_stride_b, scale_stride_h, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SHORTEST: tl.constexpr, ONE_LOOP: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    KIND: tl.constexpr, OWN_SCALES: tl.constexpr, PACKED: tl.constexpr, SINKS: tl.constexpr,
    PDL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Attends for rows of at least SHORTEST queries.

    Grid: (KV heads, tiles), or with PARTS (KV heads, items). An item is a part of a tile's KV, see
    `LongSchedule`; `combine` adds the parts. With ONE_LOOP every KV tile runs in the masked loop.
    Then a query's rounding does not depend on its neighbours in the tile."""
    # Kernels count KV in elements: a value, or a pair of 8-bit values.
    WIDTH: tl.constexpr = HEAD_DIM // 2 if KIND else HEAD_DIM
    W_PAD: tl.constexpr = D_PAD // 2 if KIND else D_PAD
    head = tl.program_id(0)
    if PARTS:
        item = items_ptr + tl.program_id(1) * 8
        row = tl.load(item)
        part = tl.load(item + 1)
        per = tl.load(item + 2)
        q_start = tl.load(item + 3)
        q_len = tl.where(row < 0, 0, tl.load(item + 4))
        seq_len = tl.load(item + 5) + q_len
        parts = tl.load(item + 6)
        local = tl.load(item + 7)
    else:
        # The last tiles of a causal prompt have the most KV, so they start first.
        tile = tl.num_programs(1) - 1 - tl.program_id(1)
        row, first_tile = row_of_tile(tile, query_start_ptr, num_rows, GROUP, BM)
        local = tile - first_tile
        q_start = tl.load(query_start_ptr + row)
        q_len = tl.load(query_start_ptr + row + 1) - q_start
        seq_len = tl.load(seq_lens_ptr + row)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if (q_len < SHORTEST) | (local * BM >= q_len * GROUP):
        return
    q, limit = tiles.load_queries(
        q_ptr, head, local, q_start, q_len, seq_len - q_len, q_stride_t, q_stride_h,
        GROUP, WIDTH, W_PAD, BM, UPCAST, KIND,
    )  # fmt: skip
    first = seq_len - q_len + local * BM // GROUP
    last = seq_len - q_len + tl.minimum((local * BM + BM - 1) // GROUP, q_len - 1)
    begin = 0
    if WINDOW:
        begin = first - window + 1
    lo = _window_start(first, window, WINDOW, BN)
    end = last + 1
    if PARTS:
        lo += part * per * BN
        end = tl.minimum(end, lo + per * BN)
    k_ptr += head.to(tl.int64) * k_stride_h
    v_ptr += head.to(tl.int64) * v_stride_h
    qk_scale = tiles.score_scale(qk_scale, k_scale_ptr, head, KIND, OWN_SCALES)
    if OWN_SCALES:
        k_scale_ptr += head.to(tl.int64) * scale_stride_h
        v_scale_ptr += head.to(tl.int64) * scale_stride_h
    table_ptr += row.to(tl.int64) * table_stride
    acc, peak, total = tiles.init_accumulators(BM, W_PAD, KIND)
    if SINKS:
        alone = q_len > 0
        if PARTS:
            alone = parts == 1
        peak, total = tiles.with_sinks(peak, total, sinks_ptr, head, local, alone, GROUP, BM)
    # KV tiles that all queries see completely lie between tiles that need a mask.
    whole_from = lo
    whole_to = lo
    if not ONE_LOOP:
        whole_to = (first + 1) // BN * BN
        if PARTS:
            whole_to = tl.minimum(whole_to, end)
        whole_to = tl.maximum(whole_to, lo)
        if WINDOW:
            whole_from = tl.cdiv(tl.maximum(last - window + 1, 0), BN) * BN
            whole_from = tl.minimum(tl.maximum(whole_from, lo), whole_to)
            acc, peak, total = tiles.attend_range(
                acc, peak, total, q, limit, lo, whole_from, begin, k_ptr, v_ptr, k_scale_ptr,
                v_scale_ptr, table_ptr, qk_scale, softcap, window,
                k_stride_b, k_stride_t, v_stride_b, v_stride_t, scale_stride_b,
                WIDTH, W_PAD, BLOCK_TOKENS, BN, True, SOFTCAP, WINDOW, UPCAST, PRECISION,
                KIND, OWN_SCALES, PACKED,
            )  # fmt: skip
        acc, peak, total = tiles.attend_range(
            acc, peak, total, q, limit, whole_from, whole_to, begin, k_ptr, v_ptr, k_scale_ptr,
            v_scale_ptr, table_ptr, qk_scale, softcap, window,
            k_stride_b, k_stride_t, v_stride_b, v_stride_t, scale_stride_b,
            WIDTH, W_PAD, BLOCK_TOKENS, BN, False, SOFTCAP, WINDOW, UPCAST, PRECISION,
            KIND, OWN_SCALES, PACKED,
        )  # fmt: skip
    acc, peak, total = tiles.attend_range(
        acc, peak, total, q, limit, whole_to, end, begin, k_ptr, v_ptr, k_scale_ptr,
        v_scale_ptr, table_ptr, qk_scale, softcap, window,
        k_stride_b, k_stride_t, v_stride_b, v_stride_t, scale_stride_b,
        WIDTH, W_PAD, BLOCK_TOKENS, BN, True, SOFTCAP, WINDOW, UPCAST, PRECISION,
        KIND, OWN_SCALES, PACKED,
    )  # fmt: skip
    result, total = tiles.average(acc, total, v_scale_ptr, head, KIND, OWN_SCALES)
    if PARTS:
        lse = peak + tl.log2(total)
        tiles.store_part(partial_ptr, lse_ptr, result, lse, limit, parts, HEAD_DIM, D_PAD, BM)
        q_len = tl.where(parts > 1, 0, q_len)
    tiles.store_output(
        out_ptr, result, head, local, q_start, q_len, out_stride_t, out_stride_h,
        GROUP, HEAD_DIM, D_PAD, BM,
    )  # fmt: skip
