"""Parts of kernels with low-rank adapters: x Aᵀ for tiles of tokens, and B times the result.

The tiles of `AdapterRows` contain tokens that share a slot. `shrink` multiplies tiles by their
slot's A. It cuts the inputs into enough parts to keep its programs busy, and the last program to
arrive adds a tile's parts. `expand` multiplies the result by the rows of B for a tile of a layer's
outputs (Sheng et al. 2023, "S-LoRA"; Chen et al. 2023, "Punica").

Programs of a kernel may wait for programs with lower numbers. Programs start in order, so the
awaited programs are already running."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.adapters import HEAD, WORDS

HEAD_WORDS: tl.constexpr = tl.constexpr(HEAD)
PLACE_WORDS: tl.constexpr = tl.constexpr(WORDS)
READY: tl.constexpr = tl.constexpr(0)
"""Index of a counter: number of finished tiles, for kernels that clear it themselves."""
DONE: tl.constexpr = tl.constexpr(1)
"""Index of a counter: number of programs that have stopped waiting for READY."""
TURNS: tl.constexpr = tl.constexpr(2)
"""Index of the first of two counters that kernels use in turn: number of tiles that have been
multiplied by A. A kernel clears the other counter. Both are 0 when a step begins."""
ARRIVED: tl.constexpr = tl.constexpr(4)
"""Index of the first of the counters of each tile's parts."""


@triton.jit
def _store_inner(
    acc, inverse, inner_ptr, line, token, tokens, r, total, inner_stride,
    BM: tl.constexpr, BR: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Stores the scaled product with A. Each projection has its own columns, filled with zeros up
    to a multiple of 8."""
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
    """Returns the number of steps of a part of a tile, and the number of parts."""
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
    """Prefetches lines into L2. Where `mask` is False, `spare_ptr` is prefetched instead."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [tl.where(mask, ptrs, spare_ptr)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def ask_for_a(
    worker, workers, count, memory_ptr, table_ptr, tiles_ptr, K, slot_stride, table_stride,
    most_parts, BR: tl.constexpr, BK: tl.constexpr, FIXED: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Prefetches the first `STEPS` steps of A that `shrink` reads."""
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
    """Multiplies tiles of x [T, K], or of norm(x), by their slot's A and its scales.

    Args:
        worker: index of this program.
        workers: number of programs.
        inner_ptr: [T, PLACES * WIDTH], the result. Columns past a projection's rank are not
            written.
        parts_ptr: fp32 [workers, BM, ranks + 1], used if a tile has several parts.
        counters_ptr: see ARRIVED.
        ready_ptr: increased by 1 for each tile.
        most_parts: the most parts of a tile.
        FIXED: the number of parts, or 0 to choose it by the number of tiles.
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
            tl.debug_barrier()  # Every thread's part is written before the atomic that signals it.
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
    """Reads a counter, and acquires all writes before the counter's increment."""
    if ASM:
        # A load is used because atomics of many programs would run one after the other.
        value = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        value = tl.atomic_add(ptr, 0, sem="acquire")
    return value


@triton.jit
def await_tiles(ready_ptr, count, ASM: tl.constexpr):
    """Waits until `count` tiles are done. ASM is the load instruction on a GPU."""
    ready = _look(ready_ptr, ASM)
    while ready < count:
        ready = _look(ready_ptr, ASM)


@triton.jit
def end_wait(counters_ptr, programs):
    """Clears the counters when all `programs` that wait have called it."""
    if tl.atomic_add(counters_ptr + DONE, 1, sem="relaxed") == programs - 1:
        tl.store(counters_ptr + READY, 0)
        tl.store(counters_ptr + DONE, 0)


@triton.jit
def slots_of(step, used, tiles_ptr, SLOTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns the slots [SLOTS] of a step of `expand`, -1 for none."""
    t = step // CHUNKS * SLOTS + tl.arange(0, SLOTS)
    return tl.load(tiles_ptr + t * 4 + 3, mask=t < used, other=-1)


@triton.jit
def find_b(slot, place, table_ptr, table_stride):
    """Returns the offset of a projection's B in the memory of each slot, and its rank."""
    there = slot >= 0
    line = table_ptr + slot.to(tl.int64) * table_stride + HEAD_WORDS + PLACE_WORDS * place
    return tl.load(line, mask=there, other=0), tl.load(line + 1, mask=there, other=0)


@triton.jit
def _load_b(memory_ptr, slot, at, rank, slot_stride, r, n, kept):
    """Returns rows `n` of the slots' B, [rows, slots, ranks], with zeros where `kept` is False.

    r is [1, 1, ranks]."""
    begin, width = slot.to(tl.int64) * slot_stride + at, (rank + 7) // 8 * 8
    at = (begin[None, :] + n[:, None] * width[None, :])[:, :, None] + r
    # Widths are multiples of 8.
    at = tl.max_contiguous(tl.multiple_of(at, [1, 1, 8]), [1, 1, 8])
    there = tl.max_constancy(kept[:, None, None] & (r < width[None, :, None]), [1, 1, 8])
    return tl.load(memory_ptr + at, mask=there, other=0.0)


@triton.jit
def _load_inner(inner_ptrs, own, r):
    """Returns the tokens' products with A, [BM, 1, ranks], zeros for tokens without a slot.

    Columns past an adapter's rank are undefined."""
    at = inner_ptrs[:, None, None] + r
    return tl.load(at, mask=(own >= 0)[:, None, None], other=0.0, cache_modifier=".cg")


@triton.jit
def _spread(values, own, slot, rank, r):
    """Returns [BM, slots, ranks] with the values of `_load_inner` in the columns of each token's
    slot, and zeros in other columns."""
    mine = (own[:, None] == slot[None, :])[:, :, None] & (r < rank[None, :, None])
    return tl.where(mine, values, 0.0)


@triton.jit
def _add_product(sums, b, h, COLUMNS: tl.constexpr, UPCAST: tl.constexpr):
    """Returns `sums` plus `h` times B."""
    h = tl.reshape(h, [sums.shape[0], COLUMNS])
    b = tl.reshape(b, [sums.shape[1], COLUMNS])
    if UPCAST:
        h = h.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(h, tl.trans(b), sums, input_precision="ieee")


@triton.jit
def projections_of(first_row, starts_ptr, ROWS: tl.constexpr, PLACES: tl.constexpr):
    """Returns the first and the last projection of `ROWS` outputs, and the first and the end output
    of the first projection."""
    place = 0
    last = 0
    for later in tl.static_range(1, PLACES):
        start = tl.load(starts_ptr + later)
        place += (start <= first_row).to(tl.int32)
        last += (start < first_row + ROWS).to(tl.int32)
    return place, last, tl.load(starts_ptr + place), tl.load(starts_ptr + place + 1)


@triton.jit
def expand(
    rows, place, last, start, end, ms, own, part, parts, used, slot, at, rank, slot1, at1, rank1,
    slot2, ready_ptr, count, memory_ptr, table_ptr, tiles_ptr, inner_ptr, starts_ptr, slot_stride,
    table_stride, inner_stride,
    BM: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, RANK: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, UPCAST: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Returns a part of B times the result of `shrink` for the outputs `rows`, fp32 [BM, ROWS].

    The parts share the steps, which have `COLUMNS` ranks of the `used` slots each. While one step
    is multiplied, the kernel loads B of the next step, the address of B for the step after it, and
    the slots of the third step. So no load waits for an address that was loaded just before.

    Args:
        rows: [ROWS]. Rows past the layer's last row repeat that row.
        place: see `projections_of`.
        last: see `projections_of`.
        start: see `projections_of`.
        end: see `projections_of`.
        ms: [BM], the tokens.
        own: [BM], the tokens' slots.
        slot: slots of the first step.
        at: offsets of B for the first step, see `find_b`.
        rank: ranks for the first step, see `find_b`.
        slot1: like `slot`, for the second step.
        at1: like `at`, for the second step.
        rank1: like `rank`, for the second step.
        slot2: slots of the third step.
        starts_ptr: int32 [PLACES + 1], the first output of each projection.
    """
    EACH: tl.constexpr = WIDTH if WIDTH < COLUMNS else COLUMNS
    SLOTS: tl.constexpr = COLUMNS // EACH
    CHUNKS: tl.constexpr = (RANK + EACH - 1) // EACH
    each = tl.arange(0, EACH)[None, None, :]
    steps = (used + SLOTS - 1) // SLOTS * CHUNKS
    sums = tl.zeros([BM, ROWS], tl.float32)
    while place <= last:
        kept = (rows >= start) & (rows < end)
        n = tl.where(kept, rows - start, 0)
        inner_ptrs = inner_ptr + ms.to(tl.int64) * inner_stride + place * WIDTH
        r = part % CHUNKS * EACH + each
        b = _load_b(memory_ptr, slot, at, rank, slot_stride, r, n, kept)
        if part < steps:
            await_tiles(ready_ptr, count, ASM)
        values = _load_inner(inner_ptrs, own, each)
        for step in tl.range(part, steps, parts, num_stages=1):
            r = (step + parts) % CHUNKS * EACH + each
            b1 = _load_b(memory_ptr, slot1, at1, rank1, slot_stride, r, n, kept)
            at2, rank2 = find_b(slot2, place, table_ptr, table_stride)
            slot3 = slots_of(step + 3 * parts, used, tiles_ptr, SLOTS, CHUNKS)
            r = step % CHUNKS * EACH + each
            if CHUNKS > 1:
                values = _load_inner(inner_ptrs, own, r)
            sums = _add_product(sums, b, _spread(values, own, slot, rank, r), COLUMNS, UPCAST)
            b, slot, rank = b1, slot1, rank1
            slot1, at1, rank1, slot2 = slot2, at2, rank2, slot3
        place += 1
        if place <= last:
            start = end
            end = tl.load(starts_ptr + place + 1)
            slot = slots_of(part, used, tiles_ptr, SLOTS, CHUNKS)
            slot1 = slots_of(part + parts, used, tiles_ptr, SLOTS, CHUNKS)
            slot2 = slots_of(part + 2 * parts, used, tiles_ptr, SLOTS, CHUNKS)
            at, rank = find_b(slot, place, table_ptr, table_stride)
            at1, rank1 = find_b(slot1, place, table_ptr, table_stride)
    return sums


@triton.jit
def expand_pair(
    n, ms, own, part, parts, used, slot, at, rank, slot1, at1, rank1, slot2, up_at, up_rank, up_at1,
    up_rank1, ready_ptr, count, memory_ptr, table_ptr, tiles_ptr, inner_ptr, slot_stride,
    table_stride, inner_stride,
    BM: tl.constexpr, BN: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, UPCAST: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Returns the result of `expand` for rows `n` of both the gate and the up projection. Gate and
    up alternate."""
    EACH: tl.constexpr = WIDTH if WIDTH < COLUMNS else COLUMNS
    SLOTS: tl.constexpr = COLUMNS // EACH
    CHUNKS: tl.constexpr = (RANK + EACH - 1) // EACH
    each = tl.arange(0, EACH)[None, None, :]
    steps = (used + SLOTS - 1) // SLOTS * CHUNKS
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    kept = n >= 0
    inner_ptrs = inner_ptr + ms.to(tl.int64) * inner_stride
    r = part % CHUNKS * EACH + each
    b = _load_b(memory_ptr, slot, at, rank, slot_stride, r, n, kept)
    up_b = _load_b(memory_ptr, slot, up_at, up_rank, slot_stride, r, n, kept)
    await_tiles(ready_ptr, count, ASM)
    values = _load_inner(inner_ptrs, own, each)
    up_values = _load_inner(inner_ptrs + WIDTH, own, each)
    for step in tl.range(part, steps, parts, num_stages=1):
        r = (step + parts) % CHUNKS * EACH + each
        b1 = _load_b(memory_ptr, slot1, at1, rank1, slot_stride, r, n, kept)
        up_b1 = _load_b(memory_ptr, slot1, up_at1, up_rank1, slot_stride, r, n, kept)
        at2, rank2 = find_b(slot2, 0, table_ptr, table_stride)
        up_at2, up_rank2 = find_b(slot2, 1, table_ptr, table_stride)
        slot3 = slots_of(step + 3 * parts, used, tiles_ptr, SLOTS, CHUNKS)
        r = step % CHUNKS * EACH + each
        if CHUNKS > 1:
            values = _load_inner(inner_ptrs, own, r)
            up_values = _load_inner(inner_ptrs + WIDTH, own, r)
        gate = _add_product(gate, b, _spread(values, own, slot, rank, r), COLUMNS, UPCAST)
        up = _add_product(up, up_b, _spread(up_values, own, slot, up_rank, r), COLUMNS, UPCAST)
        b, up_b, slot, rank, up_rank = b1, up_b1, slot1, rank1, up_rank1
        slot1, at1, rank1, up_at1, up_rank1 = slot2, at2, rank2, up_at2, up_rank2
        slot2 = slot3
    return tl.reshape(tl.join(gate, up), [BM, 2 * BN])
