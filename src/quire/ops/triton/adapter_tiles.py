"""Pieces of kernels with low-rank adapters: x Aᵀ of tiles of tokens, and B times that.

Tokens that share a slot stand together in tiles of `AdapterRows`. `shrink` multiplies tiles by
their slot's A. The inputs are cut into as many parts as it takes to keep its programs busy, and the
last part of a tile to arrive adds them up. `expand` multiplies that by the rows of B that a tile of
a layer's outputs needs (Sheng et al. 2023, "S-LoRA"; Chen et al. 2023, "Punica").

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
"""First of two words of the counters, which kernels take in turn: tiles that are multiplied by A. A
kernel clears the other word, and a step begins with clear ones."""
ARRIVED: tl.constexpr = tl.constexpr(4)
"""First of the counters of each tile's parts."""


@triton.jit
def _store_inner(
    acc, inverse, inner_ptr, line, token, tokens, r, total, inner_stride,
    BM: tl.constexpr, BR: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores the scaled product with A: each projection's ranks in columns of its own, and zeros
    up to a multiple of 8."""
    column = tl.zeros([BR], tl.int32)
    scale = tl.zeros([BR], tl.float32)
    for place in tl.static_range(PLACES):
        own = line + HEAD_WORDS + PLACE_WORDS * place
        first = tl.load(own + 2)
        mine = (r >= first) & (r < first + tl.load(own + 1))
        column = tl.where(mine, place * WIDTH + r - first, column)
        scale = tl.where(mine, tl.load(own + 3).to(tl.float32, bitcast=True), scale)
        rank = tl.load(own + 1)
        behind = rank + tl.arange(0, 8)
        tl.store(
            inner_ptr + token[:, None] * inner_stride + (place * WIDTH + behind)[None, :],
            tl.zeros([BM, 8], inner_ptr.dtype.element_ty),
            mask=(tl.arange(0, BM) < tokens)[:, None] & (behind < (rank + 7) // 8 * 8)[None, :],
        )
    value = acc * inverse[:, None] * scale[None, :]
    tl.store(
        inner_ptr + token[:, None] * inner_stride + column[None, :],
        value.to(inner_ptr.dtype.element_ty),
        mask=(tl.arange(0, BM) < tokens)[:, None] & (r < total)[None, :],
    )


@triton.jit
def cut(count, K, workers, most_parts, BK: tl.constexpr, FIXED: tl.constexpr):
    """Returns the steps of a part of a tile, and the parts."""
    steps = (K + BK - 1) // BK
    if FIXED > 0:
        splits = tl.minimum(FIXED, steps)
    else:
        splits = tl.minimum(tl.minimum(steps, most_parts), workers // tl.maximum(count, 1))
        splits = tl.maximum(1, splits)
    per = (steps + splits - 1) // splits
    return per, (steps + per - 1) // per


@triton.jit
def _ask(ptrs, mask, spare_ptr):
    """Asks for lines to be brought into L2. spare: asked for in place of those without `mask`."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [tl.where(mask, ptrs, spare_ptr)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def ask_for_a(
    worker, workers, count, memory_ptr, table_ptr, tiles_ptr, K, slot_stride, table_stride,
    most_parts, BR: tl.constexpr, BK: tl.constexpr, FIXED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Asks for the first `STEPS` steps of A that `shrink` reads."""
    LINE: tl.constexpr = 1024 // memory_ptr.dtype.element_ty.primitive_bitwidth
    per, splits = cut(count, K, workers, most_parts, BK, FIXED)
    if worker < count * splits:
        slot = tl.load(tiles_ptr + worker // splits * 4).to(tl.int64)
        line = table_ptr + slot * table_stride
        a_ptr = memory_ptr + slot * slot_stride + tl.load(line)
        total = tl.load(line + 1)
        begin = worker % splits * per * BK
        end = tl.minimum(K, begin + tl.minimum(per, STEPS) * BK)
        lines = tl.arange(0, BK // LINE) * LINE
        for r0 in range(0, total, BR):
            r = r0 + tl.arange(0, BR)
            for k0 in range(begin, end, BK):
                k = k0 + lines
                there = (r < total)[:, None] & (k < end)[None, :]
                _ask(a_ptr + r[:, None] * K + k[None, :], there, a_ptr)


@triton.jit
def shrink(
    worker, workers, x_ptr, memory_ptr, table_ptr, order_ptr, tiles_ptr, count_ptr, norm_ptr,
    inner_ptr, parts_ptr, counters_ptr, ready_ptr, K, slot_stride, table_stride, x_stride,
    inner_stride, ranks, eps, most_parts,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
    FIXED: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr, UPCAST: tl.constexpr,
    STAGES: tl.constexpr, SIGNAL: tl.constexpr,
):  # fmt: skip
    """Multiplies tiles of x [T, K], or of its RMS norm, by A of their slot and by its scales.

    worker, workers: which of how many programs this is. inner: [T, PLACES * WIDTH], the result;
    columns behind a projection's rank are left. parts: fp32 [workers, BM, ranks + 1], where there
    are several parts of a tile. counters: see ARRIVED. ready: raised by 1 for each tile.
    most_parts: of a tile. FIXED: the number of parts, 0 where it follows from the number of tiles.
    EVEN: BK divides K.
    SIGNAL: programs of the same kernel wait for the result.
    """
    count = tl.load(count_ptr)
    per, splits = cut(count, K, workers, most_parts, BK, FIXED)
    m = tl.arange(0, BM)
    for item in range(worker, count * splits, workers):
        nth = item // splits
        begin = (item % splits) * per * BK
        end = tl.minimum(K, begin + per * BK)
        tile = tiles_ptr + nth * 4
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
                tl.store(
                    part + m[:, None] * ranks + r[None, :], acc,
                    mask=(m < tokens)[:, None] & (r < total)[None, :],
                )  # fmt: skip
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
                AT_ONCE: tl.constexpr = 8 if BR <= 32 else 4
                for r0 in range(0, total, BR):
                    r = r0 + tl.arange(0, BR)
                    acc = tl.zeros([BM, BR], tl.float32)
                    for begin in range(0, splits, AT_ONCE):
                        split = begin + tl.arange(0, AT_ONCE)[:, None, None]
                        at = (
                            split * (BM * (ranks + 1))
                            + (m[:, None] * ranks + r[None, :])[None, :, :]
                        )
                        there = (split < splits) & (m < tokens)[None, :, None]
                        there = there & (r < total)[None, None, :]
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
def ask_for_b(
    begin, end, first_row, memory_ptr, table_ptr, tiles_ptr, starts_ptr, slot_stride, table_stride,
    ROWS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Asks for the rows of B from `first_row` on of the step's slots [begin, end)."""
    place = 0
    for later in tl.static_range(1, PLACES):
        place += (tl.load(starts_ptr + later) <= first_row).to(tl.int32)
    # A row is a quarter of a line at rank 16.
    n = first_row - tl.load(starts_ptr + place) + tl.arange(0, ROWS // 4) * 4
    for t0 in range(begin, end, 16):
        t = t0 + tl.arange(0, 16)
        there = t < end
        slot = tl.load(tiles_ptr + t * 4 + 3, mask=there, other=0).to(tl.int64)
        own = table_ptr + slot * table_stride + HEAD_WORDS + PLACE_WORDS * place
        at = tl.load(own, mask=there, other=0)
        width = (tl.load(own + 1, mask=there, other=0) + 7) // 8 * 8
        ptrs = memory_ptr + (slot * slot_stride + at)[None, :] + n[:, None] * width[None, :]
        _ask(ptrs, (there & (width > 0))[None, :] & (n >= 0)[:, None], memory_ptr)


@triton.jit
def expand(
    rows, first_row, ms, own, part, parts, count, memory_ptr, table_ptr, tiles_ptr, inner_ptr,
    starts_ptr, slot_stride, table_stride, inner_stride,
    BM: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, RANK: tl.constexpr,
    WIDTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Returns a part of the outputs `rows` of B times `inner` of `shrink`, fp32 [BM, ROWS].

    rows: [ROWS], from `first_row` on, of which those behind the layer's last are repeated. ms: [BM]
    tokens. own: their slots. The slots of all tiles are dealt to `parts`. starts: int32
    [PLACES + 1], where the projections begin.

    Several slots are multiplied at once: a token's row holds its values in the columns of its own
    slot, and zeros in those of others.
    """
    COLUMNS: tl.constexpr = 128 if ROWS <= 64 else 64
    EACH: tl.constexpr = WIDTH if WIDTH < COLUMNS else COLUMNS
    SLOTS: tl.constexpr = COLUMNS // EACH
    CHUNKS: tl.constexpr = (RANK + EACH - 1) // EACH
    nth = tl.arange(0, SLOTS)
    each = tl.arange(0, EACH)
    place = 0
    last = 0
    for later in tl.static_range(1, PLACES):
        start = tl.load(starts_ptr + later)
        place += (start <= first_row).to(tl.int32)
        last += (start < first_row + ROWS).to(tl.int32)
    sums = tl.zeros([BM, ROWS], tl.float32)
    while place <= last:
        start = tl.load(starts_ptr + place)
        kept = (rows >= start) & (rows < tl.load(starts_ptr + place + 1))
        n = tl.where(kept, rows - start, 0)
        h_ptrs = inner_ptr + ms.to(tl.int64)[:, None] * inner_stride + place * WIDTH
        steps = (count + SLOTS - 1) // SLOTS * CHUNKS
        for step in tl.range(part, steps, parts, num_stages=1):
            tile = step // CHUNKS * SLOTS + nth
            slot = tl.load(tiles_ptr + tile * 4, mask=tile < count, other=-1)
            before = tl.load(tiles_ptr + tile * 4 - 4, mask=(tile > 0) & (tile < count), other=-1)
            # A slot's other tiles are those behind its first.
            there = (slot >= 0) & (slot != before)
            slot = tl.where(there, slot, 0)
            line = table_ptr + slot.to(tl.int64) * table_stride + HEAD_WORDS + PLACE_WORDS * place
            at = tl.load(line, mask=there, other=0)
            width = (tl.load(line + 1, mask=there, other=0) + 7) // 8 * 8
            r = step % CHUNKS * EACH + each
            in_rank = r[None, None, :] < width[None, :, None]
            h = tl.load(
                (h_ptrs + step % CHUNKS * EACH)[:, :, None] + each[None, None, :],
                mask=(own[:, None] == slot[None, :])[:, :, None] & in_rank, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            b_row = slot.to(tl.int64) * slot_stride + tl.multiple_of(at, 16)
            b_at = b_row[None, :] + n[:, None] * tl.multiple_of(width, 8)[None, :]
            b = tl.load(
                (memory_ptr + b_at)[:, :, None] + r[None, None, :],
                mask=kept[:, None, None] & in_rank, other=0.0,
            )  # fmt: skip
            h = tl.reshape(h, [BM, COLUMNS])
            b = tl.reshape(b, [ROWS, COLUMNS])
            if UPCAST:
                h = h.to(tl.float32)
                b = b.to(tl.float32)
            sums = tl.dot(h, tl.trans(b), sums, input_precision="ieee")
        place += 1
    return sums
