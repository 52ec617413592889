"""Parts of the kernels of `kernels.py`: a tile of queries against tiles of KV.

KV is in the queries' dtype or in 8 bits (see `kv8.py`)."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from quire.ops.triton.attention import kv8

_EARLY_WIDTH = tl.constexpr(2048)


@triton.jit
def release_early(width):
    """Releases the next kernel before the own wait, if a token's queries have few values.

    The products of a wider model keep the memory busy anyway. One run of Qwen3-8B (4096 values)
    was 4 % slower with it, and Qwen3-0.6B (2048) is 6 % faster."""
    if width <= _EARLY_WIDTH:
        gdc_launch_dependents()


@triton.jit
def stored(positions, begin, end):
    return (positions >= begin) & (positions < end)


@triton.jit
def _scores(q, k, UPCAST, PRECISION: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr):
    """Returns q kᵀ, divided by `kv8.unit`."""
    if KIND:
        scores = tl.dot(q[0], tl.trans(kv8.low_bytes(k, KIND, PACKED)))
        return tl.dot(q[1], tl.trans(kv8.high_bytes(k, KIND, PACKED)), scores)
    else:
        if UPCAST:
            k = k.to(tl.float32)
        return tl.dot(q, tl.trans(k), input_precision=PRECISION)


@triton.jit
def _add_values(
    acc, decay, weights, v, UPCAST, PRECISION: tl.constexpr, KIND: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Returns acc * decay + weights v. The product is divided by `kv8.unit`."""
    if KIND:
        weights = weights.to(tl.float16)
        even = tl.dot(weights, kv8.low_bytes(v, KIND, PACKED), acc[0] * decay[:, None])
        odd = tl.dot(weights, kv8.high_bytes(v, KIND, PACKED), acc[1] * decay[:, None])
        return even, odd
    else:
        if UPCAST:
            v = v.to(tl.float32)
        acc = acc * decay[:, None]
        return tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)


@triton.jit
def attend_range(
    acc, peak, total, q, limit, start, end, begin, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    table_ptr, qk_scale, softcap, window,
    k_stride_b, k_stride_t, v_stride_b, v_stride_t, scale_stride_b,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BN: tl.constexpr,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr, OWN_SCALES: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Computes the online softmax over KV tiles [start, end).

    Only MASKED tiles check positions, for causality (`limit` is each query's position) and for the
    window. Positions outside of [begin, end) are not read, because no query sees them and they may
    have no block. `peak` is the running maximum, in log2 units, and `total` the running sum.

    8-bit KV is read as pairs of values (see `kv8.py`), and HEAD_DIM, D_PAD and strides count pairs.
    `q` and `acc` then have two tensors each, for the even and for the odd dimensions. With
    OWN_SCALES each token has its own scale."""
    dims = tl.arange(0, D_PAD)
    # Block ids are loaded one tile ahead, because otherwise each tile's loads would wait for them.
    positions = start + tl.arange(0, BN)
    block = tl.load(
        table_ptr + positions // BLOCK_TOKENS, mask=stored(positions, begin, end), other=0
    )
    for tile in range(start, end, BN):
        positions = tile + tl.arange(0, BN)
        # K and V compute their offsets separately, although their strides are equal.
        # Shared offsets would stay in registers from K's loads to V's, and a quarter fewer
        # programs would run at once.
        k_rows = block.to(tl.int64) * k_stride_b + (positions % BLOCK_TOKENS) * k_stride_t
        v_rows = block.to(tl.int64) * v_stride_b + (positions % BLOCK_TOKENS) * v_stride_t
        scale_rows = block.to(tl.int64) * scale_stride_b + positions % BLOCK_TOKENS
        ahead = positions + BN
        block = tl.load(table_ptr + ahead // BLOCK_TOKENS, mask=stored(ahead, begin, end), other=0)
        k_at = k_ptr + k_rows[:, None] + dims[None, :]
        v_at = v_ptr + v_rows[:, None] + dims[None, :]
        if MASKED:
            inside = stored(positions, begin, end)[:, None] & (dims[None, :] < HEAD_DIM)
            k = tl.load(k_at, mask=inside, other=0)
            v = tl.load(v_at, mask=inside, other=0)
        elif HEAD_DIM == D_PAD:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=dims[None, :] < HEAD_DIM, other=0)
            v = tl.load(v_at, mask=dims[None, :] < HEAD_DIM, other=0)
        scores = _scores(q, k, UPCAST, PRECISION, KIND, PACKED)
        if OWN_SCALES:
            known = stored(positions, begin, end)
            scores *= tl.load(k_scale_ptr + scale_rows, mask=known, other=0.0)[None, :]
        factor = qk_scale
        if SOFTCAP:
            # This is cap * tanh(x / cap), because qk_scale is 2 * scale / cap with a softcap, and
            # the cap is in log2 units.
            scores = 2.0 * tl.sigmoid(scores * qk_scale) - 1.0
            factor = softcap
        if MASKED:
            seen = positions[None, :] <= limit[:, None]
            if WINDOW:
                seen = seen & (positions[None, :] > limit[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        # Scores are scaled after the maximum, in the multiply-add of the exponent.
        higher = tl.maximum(peak, tl.max(scores, 1) * factor)
        base = higher
        if MASKED:
            base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * factor - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        if OWN_SCALES:
            v_scale = tl.load(v_scale_ptr + scale_rows, mask=known, other=0.0)
            weights *= (v_scale * kv8.LIFT)[None, :]
        acc = _add_values(acc, decay, weights, v, UPCAST, PRECISION, KIND, PACKED)
        peak = higher
    return acc, peak, total


@triton.jit
def _flat_rows(
    head, local, q_start, q_len, stride_t, stride_h, GROUP: tl.constexpr, BM: tl.constexpr
):
    """Returns three values [BM] for the queries of a row's tile `local`: the token within the row,
    the offset, and whether the query exists."""
    flat = local * BM + tl.arange(0, BM)
    tokens = flat // GROUP
    heads = head * GROUP + flat % GROUP
    at = (q_start + tokens).to(tl.int64) * stride_t + heads * stride_h
    return tokens, at, flat < q_len * GROUP


@triton.jit
def load_queries(
    q_ptr, head, local, q_start, q_len, first, stride_t, stride_h,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BM: tl.constexpr,
    UPCAST: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Returns the queries of a row's tile, [BM, D_PAD], and their positions, [BM], -1 past the
    row's end.

    With 8-bit KV the queries are two tensors. The row's first query has position `first`."""
    tokens, rows, live = _flat_rows(head, local, q_start, q_len, stride_t, stride_h, GROUP, BM)
    dims = tl.arange(0, D_PAD)
    inside = live[:, None] & (dims[None, :] < HEAD_DIM)
    positions = tl.where(live, first + tokens, -1)
    if KIND:
        at = q_ptr + rows[:, None] + 2 * dims[None, :]
        even = tl.load(at, mask=inside, other=0.0)
        odd = tl.load(at + 1, mask=inside, other=0.0)
        return (kv8.fp16(even), kv8.fp16(odd)), positions
    else:
        q = tl.load(q_ptr + rows[:, None] + dims[None, :], mask=inside, other=0.0)
        if UPCAST:
            q = q.to(tl.float32)
        return q, positions


@triton.jit
def init_accumulators(BM: tl.constexpr, D_PAD: tl.constexpr, KIND: tl.constexpr):
    """Returns the initial state of `attend_range`: acc, peak, total."""
    acc = tl.zeros([BM, D_PAD], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if KIND:
        return (acc, acc), peak, total
    else:
        return acc, peak, total


@triton.jit
def with_sinks(
    peak, total, sinks_ptr, head, local, alone, GROUP: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Returns the initial peak and total of queries whose heads have sinks.

    With `alone`, one program reads all KV of the tile and starts from the sinks. If the KV has
    several parts, `combine` adds the sinks."""
    flat = local * BM + tl.arange(0, BM)
    sinks = sink(sinks_ptr, head * GROUP + flat % GROUP)
    return tl.where(alone, sinks, peak), tl.where(alone, 1.0, total)


@triton.jit
def sink(sinks_ptr, heads):
    """Returns the sinks' scores in log2 units."""
    return tl.load(sinks_ptr + heads).to(tl.float32) * 1.4426950408889634


@triton.jit
def average(acc, total, v_scale_ptr, head, KIND: tl.constexpr, OWN_SCALES: tl.constexpr):
    """Returns acc / total, [BM, all dimensions], and the sums (1 for queries without KV)."""
    total = tl.where(total > 0.0, total, 1.0)
    if KIND:
        factor = kv8.unit(KIND)
        if OWN_SCALES:
            factor /= kv8.LIFT
        else:
            factor *= tl.load(v_scale_ptr + head)
        return tl.interleave(acc[0], acc[1]) * (factor / total)[:, None], total
    else:
        return acc / total[:, None], total


@triton.jit
def score_scale(
    qk_scale, k_scale_ptr, head, KIND: tl.constexpr, OWN_SCALES: tl.constexpr
):  # fmt: skip
    """Returns the factor by which the products of `_scores` are multiplied."""
    if KIND:
        qk_scale *= kv8.unit(KIND)
        if not OWN_SCALES:
            qk_scale *= tl.load(k_scale_ptr + head)
    return qk_scale


@triton.jit
def store_part(
    partial_ptr, lse_ptr, result, lse, limit, parts,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Stores a part for `combine` if there are several parts. Grid: (KV heads, items).

    Stores the result [BM, D_PAD] and the logarithm of the sum [BM] of each query. A query that sees
    no KV of the part gets zeros and -inf."""
    dims = tl.arange(0, D_PAD)
    place = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * BM
    at = place + tl.arange(0, BM)
    several = tl.where(parts > 1, limit, -1) >= 0
    inside = several[:, None] & (dims[None, :] < HEAD_DIM)
    tl.store(partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)
    tl.store(lse_ptr + at, lse, mask=several)


@triton.jit
def store_output(
    out_ptr, result, head, local, q_start, q_len, stride_t, stride_h,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    _, rows, live = _flat_rows(head, local, q_start, q_len, stride_t, stride_h, GROUP, BM)
    dims = tl.arange(0, D_PAD)
    inside = live[:, None] & (dims[None, :] < HEAD_DIM)
    at = out_ptr + rows[:, None] + dims[None, :]
    tl.store(at, result.to(out_ptr.dtype.element_ty), mask=inside)
