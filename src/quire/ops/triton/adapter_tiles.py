"""Pieces of kernels with low-rank adapters: x Aᵀ of tiles of tokens, and B times that.

Tokens that share a slot stand together in tiles of `AdapterRows`. `shrink` multiplies tiles by
their slot's A. The inputs are cut into as many parts as it takes to keep its programs busy, and the
last part of a tile to arrive adds them up. `expand` multiplies that by B (Sheng et al. 2023,
"S-LoRA"; Chen et al. 2023, "Punica").

Programs of a kernel may wait for those before them: programs are started in order, so that those
that are waited for never wait for a place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.adapters import HEAD, WORDS

HEAD_WORDS: tl.constexpr = tl.constexpr(HEAD)
PLACE_WORDS: tl.constexpr = tl.constexpr(WORDS)
READY: tl.constexpr = tl.constexpr(0)
"""Word of the counters: tiles that are done, of the kernels that clear it themselves."""
DONE: tl.constexpr = tl.constexpr(1)
"""Word of the counters: programs that no longer wait for that."""
TURNS: tl.constexpr = tl.constexpr(2)
"""First of two pairs of words of the counters, which kernels take in turn: tiles that are
multiplied by A, and parts of tiles that are multiplied by B. A kernel clears the other pair, and a
step begins with clear ones."""
ARRIVED: tl.constexpr = tl.constexpr(6)
"""First of the counters of each tile's parts."""


@triton.jit
def _store_inner(
    acc, inverse, inner_ptr, line, token, tokens, r, total, inner_stride,
    BM: tl.constexpr, BR: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores the scaled product with A: each projection's ranks in columns of its own."""
    column = tl.zeros([BR], tl.int32)
    scale = tl.zeros([BR], tl.float32)
    for place in tl.static_range(PLACES):
        own = line + HEAD_WORDS + PLACE_WORDS * place
        first = tl.load(own + 2)
        mine = (r >= first) & (r < first + tl.load(own + 1))
        column = tl.where(mine, place * WIDTH + r - first, column)
        scale = tl.where(mine, tl.load(own + 3).to(tl.float32, bitcast=True), scale)
    value = acc * inverse[:, None] * scale[None, :]
    tl.store(
        inner_ptr + token[:, None] * inner_stride + column[None, :],
        value.to(inner_ptr.dtype.element_ty),
        mask=(tl.arange(0, BM) < tokens)[:, None] & (r < total)[None, :],
    )


@triton.jit
def shrink(
    worker, workers, x_ptr, memory_ptr, table_ptr, order_ptr, tiles_ptr, count_ptr, norm_ptr,
    inner_ptr, parts_ptr, counters_ptr, ready_ptr, K, slot_stride, table_stride, x_stride,
    inner_stride, ranks, eps,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
    FIXED: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, UPCAST: tl.constexpr,
    STAGES: tl.constexpr, SIGNAL: tl.constexpr,
):  # fmt: skip
    """Multiplies tiles of x [T, K], or of its RMS norm, by A of their slot and by its scales.

    worker, workers: which of how many programs this is. inner: [T, PLACES * WIDTH], the result;
    columns behind a projection's rank are left. parts: fp32 [workers, BM, ranks + 1], where there
    are several parts of a tile. counters: see ARRIVED. ready: raised by 1 for each tile.
    FIXED: the number of parts, 0 where it follows from the number of tiles. EVEN: BK divides K.
    SIGNAL: programs of the same kernel wait for the result.
    """
    count = tl.load(count_ptr)
    steps = (K + BK - 1) // BK
    if FIXED > 0:
        splits = tl.minimum(FIXED, steps)
    else:
        splits = tl.minimum(tl.minimum(steps, 16), workers // tl.maximum(count, 1))
        splits = tl.maximum(1, splits)
    per = (steps + splits - 1) // splits
    splits = (steps + per - 1) // per
    m = tl.arange(0, BM)
    for item in range(worker, count * splits, workers):
        nth = item // splits
        begin = (item % splits) * per * BK
        end = tl.minimum(K, begin + per * BK)
        tile = tiles_ptr + nth * 3
        slot = tl.load(tile).to(tl.int64)
        first = tl.load(tile + 1)
        tokens = tl.load(tile + 2)
        line = table_ptr + slot * table_stride
        total = tl.load(line + 1)
        a_ptr = memory_ptr + slot * slot_stride + tl.multiple_of(tl.load(line), 16)
        token = tl.load(order_ptr + first + m, mask=m < tokens, other=0).to(tl.int64)
        part = parts_ptr + item * (BM * (ranks + 1))
        for r0 in range(0, total, BR):
            r = r0 + tl.arange(0, BR)
            acc = tl.zeros([BM, BR], tl.float32)
            squares = tl.zeros([BM], tl.float32)
            for k0 in tl.range(begin, end, BK, num_stages=STAGES):
                k = k0 + tl.arange(0, BK)
                x_mask = (m < tokens)[:, None]
                a_mask = (r < total)[:, None]
                if not EVEN:
                    x_mask = x_mask & (k < end)[None, :]
                    a_mask = a_mask & (k < end)[None, :]
                x = tl.load(x_ptr + token[:, None] * x_stride + k[None, :], mask=x_mask, other=0.0)
                a = tl.load(a_ptr + r[:, None] * K + k[None, :], mask=a_mask, other=0.0)
                if NORM:
                    xf = x.to(tl.float32)
                    squares += tl.sum(xf * xf, 1)
                    g = tl.load(norm_ptr + k, mask=k < end, other=0.0).to(tl.float32)
                    x = (xf * g[None, :]).to(x.dtype)
                if UPCAST:
                    x = x.to(tl.float32)
                    a = a.to(tl.float32)
                acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
            if splits == 1:
                inverse = tl.full([BM], 1.0, tl.float32)
                if NORM:
                    inverse = tl.rsqrt(squares / K + eps)
                _store_inner(
                    acc, inverse, inner_ptr, line, token, tokens, r, total, inner_stride,
                    BM, BR, PLACES, WIDTH,
                )  # fmt: skip
            else:
                tl.store(part + m[:, None] * ranks + r[None, :], acc, mask=(r < total)[None, :])
                if NORM:
                    tl.store(part + BM * ranks + m, squares)
        last = True
        if splits > 1:
            tl.debug_barrier()  # every thread's part is written before the atomic that says so
            arrived = counters_ptr + ARRIVED + nth
            last = tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1
            if last:
                tl.store(arrived, 0)
                parts = parts_ptr + nth * splits * (BM * (ranks + 1))
                inverse = tl.full([BM], 1.0, tl.float32)
                if NORM:
                    squares = tl.zeros([BM], tl.float32)
                    for begin in range(0, splits, 8):
                        split = begin + tl.arange(0, 8)[:, None]
                        at = parts + split * (BM * (ranks + 1)) + BM * ranks + m[None, :]
                        some = tl.load(at, mask=split < splits, other=0.0, cache_modifier=".cg")
                        squares += tl.sum(some, 0)
                    inverse = tl.rsqrt(squares / K + eps)
                for r0 in range(0, total, BR):
                    r = r0 + tl.arange(0, BR)
                    acc = tl.zeros([BM, BR], tl.float32)
                    for begin in range(0, splits, 8):
                        split = begin + tl.arange(0, 8)[:, None, None]
                        at = (
                            split * (BM * (ranks + 1))
                            + (m[:, None] * ranks + r[None, :])[None, :, :]
                        )
                        there = (split < splits) & (r < total)[None, None, :]
                        some = tl.load(parts + at, mask=there, other=0.0, cache_modifier=".cg")
                        acc += tl.sum(some, 0)
                    _store_inner(
                        acc, inverse, inner_ptr, line, token, tokens, r, total, inner_stride,
                        BM, BR, PLACES, WIDTH,
                    )  # fmt: skip
        if SIGNAL and last:
            tl.debug_barrier()
            tl.atomic_add(ready_ptr, 1, sem="release")


@triton.jit
def _look(ptr, ASM: tl.constexpr):
    """Returns a counter. What was written before it was raised is then seen."""
    if ASM:
        # Other than an atomic, looks of many programs do not queue.
        value = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        value = tl.atomic_add(ptr, 0, sem="acquire")
    return value


@triton.jit
def await_tiles(ready_ptr, count, ASM: tl.constexpr):
    """Waits until `count` tiles are done. ASM: on a GPU."""
    ready = _look(ready_ptr, ASM)
    while ready < count:
        ready = _look(ready_ptr, ASM)


@triton.jit
def end_wait(counters_ptr, programs):
    """Clears the counters once all of the `programs` that wait have called it."""
    if tl.atomic_add(counters_ptr + DONE, 1, sem="relaxed") == programs - 1:
        tl.store(counters_ptr + READY, 0)
        tl.store(counters_ptr + DONE, 0)


@triton.jit
def parts_of_tiles(workers, count):
    """Returns into how many parts `expand` cuts each of `count` tiles."""
    return tl.maximum(1, workers // tl.maximum(count, 1))


@triton.jit
def expand(
    worker, workers, count, memory_ptr, table_ptr, order_ptr, tiles_ptr, inner_ptr, delta_ptr,
    starts_ptr, done_ptr, slot_stride, table_stride, inner_stride, delta_stride,
    BM: tl.constexpr, BN: tl.constexpr, PLACES: tl.constexpr, RANK: tl.constexpr,
    WIDTH: tl.constexpr, UPCAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes B times `inner` of `shrink` for all tiles: delta, fp32 [T, outputs].

    worker, workers: which of how many programs this is. starts: int32 [PLACES + 1], where the
    projections begin. done: raised by 1 for each part of a tile, see `parts_of_tiles`.
    """
    EACH: tl.constexpr = WIDTH if WIDTH < 64 else 64
    parts = parts_of_tiles(workers, count)
    m = tl.arange(0, BM)
    each = tl.arange(0, EACH)
    for item in range(worker, count * parts, workers):
        tile = tiles_ptr + (item // parts) * 3
        slot = tl.load(tile).to(tl.int64)
        first = tl.load(tile + 1)
        tokens = tl.load(tile + 2)
        line = table_ptr + slot * table_stride
        token = tl.load(order_ptr + first + m, mask=m < tokens, other=0).to(tl.int64)
        kept = (m < tokens)[:, None]
        for place in tl.static_range(PLACES):
            low = tl.load(starts_ptr + place)
            size = tl.load(starts_ptr + place + 1) - low
            own = line + HEAD_WORDS + PLACE_WORDS * place
            rank = tl.load(own + 1)
            width = (rank + 7) // 8 * 8
            b_ptr = memory_ptr + slot * slot_stride + tl.multiple_of(tl.load(own), 16)
            h_ptrs = inner_ptr + token[:, None] * inner_stride + (place * WIDTH + each)[None, :]
            h = tl.load(h_ptrs, mask=kept & (each < rank)[None, :], other=0.0, cache_modifier=".cg")
            per = ((size + BN - 1) // BN + parts - 1) // parts * BN
            start = item % parts * per
            for n0 in tl.range(start, tl.minimum(size, start + per), BN, num_stages=STAGES):
                n = n0 + tl.arange(0, BN)
                sums = tl.zeros([BM, BN], tl.float32)
                for begin in tl.static_range(0, RANK, EACH):
                    inner = h
                    if begin > 0:
                        inner = tl.load(
                            h_ptrs + begin, mask=kept & (begin + each < rank)[None, :], other=0.0,
                            cache_modifier=".cg",
                        )  # fmt: skip
                    b = tl.load(
                        b_ptr + n[:, None] * width + (begin + each)[None, :],
                        mask=(n < size)[:, None] & (begin + each < width)[None, :], other=0.0,
                    )  # fmt: skip
                    if UPCAST:
                        inner = inner.to(tl.float32)
                        b = b.to(tl.float32)
                    sums = tl.dot(inner, tl.trans(b), sums, input_precision="ieee")
                tl.store(
                    delta_ptr + token[:, None] * delta_stride + (low + n)[None, :], sums,
                    mask=kept & (n < size)[None, :],
                )  # fmt: skip
        tl.debug_barrier()  # every thread's outputs are written before the atomic that says so
        tl.atomic_add(done_ptr, 1, sem="release")
