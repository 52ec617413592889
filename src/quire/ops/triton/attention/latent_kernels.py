"""Kernels of attention over latents: a tile of (token, head) pairs against tiles of latents.

A latent tile is read once, and serves as keys and as values. A tile's heads are a block of
neighbours. Blocks of heads take the place of KV heads in `kernels.py`. These kernels use the same
schedules, tiles and `combine`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.attention import kv8, tiles
from quire.ops.triton.attention.kernels import row_of_tile


@triton.jit
def _attend_range(
    acc, peak, total, q, q_key, limit, start, end, kv_ptr, key_ptr, scale_ptr, table_ptr, qk_scale,
    stride_b, stride_t, key_stride_b, key_stride_t, scale_stride_b,
    RANK: tl.constexpr, R_PAD: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BN: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    KIND: tl.constexpr, OWN_SCALES: tl.constexpr,
):  # fmt: skip
    """Online softmax over tiles [start, end) of latents; see `tiles.attend_range`.

    Every tile is masked, because a separate loop for tiles without a mask would not fit the
    registers.

    Args:
        q: queries of latents [BM, R_PAD].
        q_key: queries of shared keys [BM, KEY_PAD].
    """
    dims = tl.arange(0, R_PAD)
    key_dims = tl.arange(0, KEY_PAD)
    # Block ids are loaded one tile ahead, because otherwise each tile's loads would wait for them.
    positions = start + tl.arange(0, BN)
    block = tl.load(table_ptr + positions // BLOCK_TOKENS, mask=positions < end, other=0)
    for tile in range(start, end, BN):
        positions = tile + tl.arange(0, BN)
        place = positions % BLOCK_TOKENS
        rows = block.to(tl.int64) * stride_b + place * stride_t
        key_rows = block.to(tl.int64) * key_stride_b + place * key_stride_t
        scale_at = scale_ptr + tl.zeros([BN], tl.int64)
        if OWN_SCALES:
            scale_at += block.to(tl.int64) * scale_stride_b + place
        ahead = positions + BN
        block = tl.load(table_ptr + ahead // BLOCK_TOKENS, mask=ahead < end, other=0)
        at = kv_ptr + rows[:, None] + dims[None, :]
        key_at = key_ptr + key_rows[:, None] + key_dims[None, :]
        stored = (positions < end)[:, None]
        inside = stored & (dims[None, :] < RANK)
        key_inside = stored & (key_dims[None, :] < KEY)
        latent = tl.load(at, mask=inside, other=0)
        key = tl.load(key_at, mask=key_inside, other=0.0)
        if KIND:
            # A byte converts to 16 bits exactly. Scales are applied to the columns of scores and
            # of weights.
            scale = tl.load(scale_at, mask=positions < end, other=0.0)
            latent = kv8.widened(latent, key, KIND)
        if UPCAST:
            latent = latent.to(tl.float32)
            key = key.to(tl.float32)
        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        if KIND:
            scores *= scale[None, :]
        scores = tl.dot(q_key, tl.trans(key), scores, input_precision=PRECISION)
        scores = tl.where(positions[None, :] <= limit[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1) * qk_scale)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * qk_scale - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        if KIND:
            weights *= scale[None, :] * kv8.LIFT
        acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision=PRECISION)
        peak = higher
    if KIND:
        acc /= kv8.LIFT
    return acc, peak, total


@triton.jit
def _load_queries(
    q_ptr, head, local, q_start, q_len, first, stride_t, stride_h,
    GROUP: tl.constexpr, RANK: tl.constexpr, R_PAD: tl.constexpr, KEY: tl.constexpr,
    KEY_PAD: tl.constexpr, BM: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Returns a tile's queries for latents, its queries for shared keys, and their positions.

    See `tiles.load_queries`."""
    q, limit = tiles.load_queries(
        q_ptr, head, local, q_start, q_len, first, stride_t, stride_h,
        GROUP, RANK, R_PAD, BM, UPCAST, 0,
    )  # fmt: skip
    q_key, _ = tiles.load_queries(
        q_ptr + RANK, head, local, q_start, q_len, first, stride_t, stride_h,
        GROUP, KEY, KEY_PAD, BM, UPCAST, 0,
    )  # fmt: skip
    return q, q_key, limit


@triton.jit
def latent_short(
    q_ptr, kv_ptr, key_ptr, scale_ptr, out_ptr, partial_ptr, lse_ptr, items_ptr, table_ptr,
    qk_scale,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, stride_b, stride_t, key_stride_b,
    key_stride_t, scale_stride_b, table_stride,
    GROUP: tl.constexpr, RANK: tl.constexpr, R_PAD: tl.constexpr, KEY: tl.constexpr,
    KEY_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr, OWN_SCALES: tl.constexpr,
    PDL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Attends for rows whose queries fit one tile. Grid: (blocks of GROUP heads, items), see
    `Schedule`."""
    head = tl.program_id(0)
    item = items_ptr + tl.program_id(1) * 8
    row = tl.load(item)
    start = tl.load(item + 1)
    end = tl.load(item + 2)
    q_start = tl.load(item + 3)
    q_len = tl.load(item + 4)
    first = tl.load(item + 5)
    parts = 1
    if PARTS:
        parts = tl.load(item + 6)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if row < 0:
        return
    table_ptr += row.to(tl.int64) * table_stride
    q, q_key, limit = _load_queries(
        q_ptr, head, 0, q_start, q_len, first, q_stride_t, q_stride_h,
        GROUP, RANK, R_PAD, KEY, KEY_PAD, BM, UPCAST,
    )  # fmt: skip
    acc, peak, total = tiles.init_accumulators(BM, R_PAD, 0)
    acc, peak, total = _attend_range(
        acc, peak, total, q, q_key, limit, start, end, kv_ptr, key_ptr, scale_ptr, table_ptr,
        qk_scale, stride_b, stride_t, key_stride_b, key_stride_t, scale_stride_b, RANK, R_PAD, KEY,
        KEY_PAD, BLOCK_TOKENS, BN, UPCAST, PRECISION, KIND, OWN_SCALES,
    )  # fmt: skip
    total = tl.where(total > 0.0, total, 1.0)
    result = acc / total[:, None]
    if PARTS:
        lse = peak + tl.log2(total)
        tiles.store_part(partial_ptr, lse_ptr, result, lse, limit, parts, RANK, R_PAD, BM)
        # `combine` writes rows of several parts.
        q_len = tl.where(parts > 1, 0, q_len)
    tiles.store_output(
        out_ptr, result, head, 0, q_start, q_len, out_stride_t, out_stride_h,
        GROUP, RANK, R_PAD, BM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def latent_long(
    q_ptr, kv_ptr, key_ptr, scale_ptr, out_ptr, partial_ptr, lse_ptr, items_ptr, query_start_ptr,
    seq_lens_ptr, table_ptr, num_rows, qk_scale,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, stride_b, stride_t, key_stride_b,
    key_stride_t, scale_stride_b, table_stride,
    GROUP: tl.constexpr, RANK: tl.constexpr, R_PAD: tl.constexpr, KEY: tl.constexpr,
    KEY_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SHORTEST: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr,
    OWN_SCALES: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Attends for rows of at least SHORTEST queries.

    Grid: (blocks of heads, tiles), or with PARTS (blocks of heads, items), see `LongSchedule`."""
    head = tl.program_id(0)
    part = 0
    per = 0
    parts = 1
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
    table_ptr += row.to(tl.int64) * table_stride
    q, q_key, limit = _load_queries(
        q_ptr, head, local, q_start, q_len, seq_len - q_len, q_stride_t, q_stride_h,
        GROUP, RANK, R_PAD, KEY, KEY_PAD, BM, UPCAST,
    )  # fmt: skip
    end = seq_len - q_len + tl.minimum((local * BM + BM - 1) // GROUP, q_len - 1) + 1
    lo = 0
    if PARTS:
        lo = part * per * BN
        end = tl.minimum(end, lo + per * BN)
    acc, peak, total = tiles.init_accumulators(BM, R_PAD, 0)
    acc, peak, total = _attend_range(
        acc, peak, total, q, q_key, limit, lo, end, kv_ptr, key_ptr, scale_ptr, table_ptr,
        qk_scale, stride_b, stride_t, key_stride_b, key_stride_t, scale_stride_b, RANK, R_PAD, KEY,
        KEY_PAD, BLOCK_TOKENS, BN, UPCAST, PRECISION, KIND, OWN_SCALES,
    )  # fmt: skip
    total = tl.where(total > 0.0, total, 1.0)
    result = acc / total[:, None]
    if PARTS:
        lse = peak + tl.log2(total)
        tiles.store_part(partial_ptr, lse_ptr, result, lse, limit, parts, RANK, R_PAD, BM)
        q_len = tl.where(parts > 1, 0, q_len)
    tiles.store_output(
        out_ptr, result, head, local, q_start, q_len, out_stride_t, out_stride_h,
        GROUP, RANK, R_PAD, BM,
    )  # fmt: skip
