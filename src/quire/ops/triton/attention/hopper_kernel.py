"""The kernel of `hopper.py`: tiles of queries against paged KV by TMA and wgmma.

A program computes several tiles of 128 (token, head) pairs. One warp copies pages of K and V into
rings in shared memory. It runs ahead of two warpgroups with 64 pairs each, or of one warpgroup if
no row has more than 64. While a warpgroup computes the softmax weights of one KV tile, the tensor
cores multiply the preceding tile's weights by its values. They also work for the other warpgroup
(FlashAttention-3, Shah et al., 2024). A program reads KV from the last position to the first, and
fetches the next tile's queries and KV meanwhile. Pages of 8 bits go to separate rings, and one more
warpgroup widens them to tiles of fp16."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from quire.ops.triton.attention.hopper_tiles import (
    COLUMNS,
    ROWS,
    ask_queries,
    attend_tiles,
    item_at,
)
from quire.ops.triton.attention.hopper_widen import widen_pages
from quire.ops.triton.hopper_common import (
    barrier,
    concat,
    load_box,
    reinterpret,
    wait_and_release,
)


@gluon.jit
def _copy_tile(
    desc, pages, full, empty, i, tile, table, first_page, last_page, head_row, block_rows,
    BLOCK_TOKENS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Starts the copy of a KV tile as number i of a ring.

    Pages outside of [first_page, last_page] may have no block, so the nearest page inside replaces
    them."""
    PAGES: gl.constexpr = BN // PAGE
    WIDTH: gl.constexpr = pages.shape[2]
    PARTS: gl.constexpr = D // WIDTH
    blocks = ()
    for page in gl.static_range(PAGES):
        index = (tile * BN + page * PAGE) // BLOCK_TOKENS
        index = gl.minimum(gl.maximum(index, first_page), last_page)
        blocks += (gl.load(table + index),)  # type: ignore[assignment]
    stage = i % STAGES
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), (i // STAGES + 1) & 1)
    mbarrier.expect(bar, BN * D * pages.dtype.primitive_bitwidth // 8)
    for page in gl.static_range(PAGES):
        at = (tile * BN + page * PAGE) % BLOCK_TOKENS
        row = blocks[page] * block_rows + head_row + at
        for part in gl.static_range(PARTS):
            load_box(
                desc, [row, part * WIDTH], bar,
                pages.index((stage * PARTS + part) * PAGES + page),
            )  # fmt: skip


@gluon.jit
def _produce(
    k_desc, v_desc, k_pages, v_pages, barriers, rows, table_ptr, rounds, window, table_stride,
    k_block_rows, k_head_rows, v_block_rows, v_head_rows,
    GROUP: gl.constexpr, BLOCK_TOKENS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    full_k, full_v, empty_k, empty_v = barriers
    done = 0
    for index in range(rounds):
        head, row, _, _, _, length, _, _, begin, low, count = item_at(
            index, rows, window, GROUP, BN, WINDOW, CONSUMERS
        )
        table = table_ptr + row.to(gl.int64) * table_stride
        first_page = begin // BLOCK_TOKENS
        last_page = (length - 1) // BLOCK_TOKENS
        top = low + count - 1 + done
        # Keys are copied one tile ahead of values, because the values of a tile are used only
        # after the next tile's weights have been computed.
        for i in range(done, done + count + 1):
            if i < done + count:
                _copy_tile(
                    k_desc, k_pages, full_k, empty_k, i, top - i, table, first_page, last_page,
                    head * k_head_rows, k_block_rows, BLOCK_TOKENS, BN, D, PAGE, STAGES,
                )  # fmt: skip
            if i > done:
                _copy_tile(
                    v_desc, v_pages, full_v, empty_v, i - 1, top - i + 1, table, first_page,
                    last_page, head * v_head_rows, v_block_rows, BLOCK_TOKENS, BN, D, PAGE, STAGES,
                )  # fmt: skip
        done += count


@gluon.jit
def _consume(
    q_ptr, out_ptr, sinks_ptr, q_tiles, rings, rows, rounds, numbers, strides,
    GROUP: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr,
    SINKS: gl.constexpr, CONSUMERS: gl.constexpr, CLEAN: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    q_stride_t, q_stride_h, out_stride_t, out_stride_h = strides
    done = 0
    item = item_at(0, rows, numbers[2], GROUP, BN, WINDOW, CONSUMERS)
    base = (item[2] * CONSUMERS + WHICH) * ROWS
    ask_queries(
        q_ptr, q_tiles.index(WHICH), base, item[0], item[3], item[4], q_stride_t, q_stride_h,
        GROUP, D,
    )  # fmt: skip
    for index in range(rounds):
        ahead = item
        ahead_base = base
        if index + 1 < rounds:
            ahead = item_at(index + 1, rows, numbers[2], GROUP, BN, WINDOW, CONSUMERS)
            ahead_base = (ahead[2] * CONSUMERS + WHICH) * ROWS
            ask_queries(
                q_ptr, q_tiles.index((index + 1) % 2 * CONSUMERS + WHICH), ahead_base, ahead[0],
                ahead[3], ahead[4], q_stride_t, q_stride_h, GROUP, D,
            )  # fmt: skip
        else:
            async_copy.commit_group()
        if item[10] > 0:
            attend_tiles(
                out_ptr, sinks_ptr, q_tiles.index(index % 2 * CONSUMERS + WHICH), rings, base,
                item, done, numbers, out_stride_t, out_stride_h,
                GROUP, BN, D, PAGE, STAGES, SOFTCAP, WINDOW, SINKS, CLEAN,
            )  # fmt: skip
        done += item[10]
        item = ahead
        base = ahead_base
    async_copy.wait_group(0)


@gluon.jit
def _ring_barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Returns two barriers for each stage of a ring: one signals that a tile has arrived, the other
    that it has been read."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=READERS)
    return full, empty


RING_BYTES = gl.constexpr(128 * 128)
"""Bytes of a ring of 8-bit tiles."""
SIZES = ["num_rows", "kv_heads", "most", "rounds", "shortest", "window", "table_stride"]
"""Arguments whose values do not cause further compilations."""


@gluon.jit(do_not_specialize=SIZES)
def attend_pages(
    q_ptr, k_desc, v_desc, k_scale_ptr, v_scale_ptr, sinks_ptr, out_ptr, query_start_ptr,
    seq_lens_ptr, table_ptr, num_rows, kv_heads, most, rounds, shortest, qk_scale, softcap, window,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, k_block_rows, k_head_rows, v_block_rows,
    v_head_rows, scale_stride_b, scale_stride_h, table_stride,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_TOKENS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr,
    SINKS: gl.constexpr, CONSUMERS: gl.constexpr, KIND: gl.constexpr, OWN_SCALES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Attends for rows of at least `shortest` queries, in tiles of CONSUMERS * ROWS pairs.

    Each program takes `rounds` of the `most` tiles of each KV head.

    Args:
        k_desc: the pool of keys as rows of D values, in boxes of a page, or of a KV tile if that is
            smaller.
        v_desc: like `k_desc`, for values.
        k_block_rows: rows from one block of keys to the next.
        v_block_rows: like `k_block_rows`, for values.
        k_head_rows: rows from one head of keys to the next.
        v_head_rows: like `k_head_rows`, for values.
        KIND: see `kv8.constants`.
        OWN_SCALES: see `kv8.constants`.
    """
    PAGE: gl.constexpr = BLOCK_TOKENS if BLOCK_TOKENS < BN else BN
    PIECES: gl.constexpr = STAGES * (D // COLUMNS) * (BN // PAGE)
    dtype: gl.constexpr = gl.float16 if KIND > 0 else q_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2 * CONSUMERS, ROWS, D], layout)
    k_pages = gl.allocate_shared_memory(dtype, [PIECES, PAGE, COLUMNS], layout)
    v_pages = gl.allocate_shared_memory(dtype, [PIECES, PAGE, COLUMNS], layout)
    k_tiles = reinterpret(k_pages, dtype, [STAGES, BN, D], layout)
    v_tiles = reinterpret(v_pages, dtype, [STAGES, BN, D], layout)
    full_k, empty_k = _ring_barriers(STAGES, CONSUMERS)
    full_v, empty_v = _ring_barriers(STAGES, CONSUMERS)
    barriers = (full_k, full_v, empty_k, empty_v)
    rows = (query_start_ptr, seq_lens_ptr, num_rows, kv_heads, most, shortest)
    queries = (
        q_ptr, out_ptr, sinks_ptr, q_tiles, concat((k_tiles, v_tiles), barriers), rows, rounds,
        (qk_scale, softcap, window), (q_stride_t, q_stride_h, out_stride_t, out_stride_h),
    )  # fmt: skip
    where = (
        rows, table_ptr, rounds, window, table_stride, k_block_rows, k_head_rows, v_block_rows,
        v_head_rows,
    )  # fmt: skip
    one: gl.constexpr = (
        GROUP, BN, D, PAGE, STAGES, SOFTCAP, WINDOW, SINKS, CONSUMERS, KIND > 0, 0,
    )  # fmt: skip
    other: gl.constexpr = (
        GROUP, BN, D, PAGE, STAGES, SOFTCAP, WINDOW, SINKS, CONSUMERS, KIND > 0, 1,
    )  # fmt: skip
    # The copying warp passes registers that it does not need to the other warps.
    if KIND > 0:
        byte_layout: gl.constexpr = gl.NVMMASharedLayout(D, 8, 2)
        WAITING: gl.constexpr = RING_BYTES // (BN * D)
        k_bytes = gl.allocate_shared_memory(gl.uint8, [WAITING * BN // PAGE, PAGE, D], byte_layout)
        v_bytes = gl.allocate_shared_memory(gl.uint8, [WAITING * BN // PAGE, PAGE, D], byte_layout)
        full_k_bytes, empty_k_bytes = _ring_barriers(WAITING, 1)
        full_v_bytes, empty_v_bytes = _ring_barriers(WAITING, 1)
        byte_barriers = (full_k_bytes, full_v_bytes, empty_k_bytes, empty_v_bytes)
        pages = concat((k_desc, v_desc, k_bytes, v_bytes, byte_barriers), where)
        byte_paging: gl.constexpr = (GROUP, BLOCK_TOKENS, BN, D, PAGE, WAITING, WINDOW, CONSUMERS)
        scales = (k_scale_ptr, v_scale_ptr, scale_stride_b, scale_stride_h)
        bytes_of = (
            scales, reinterpret(k_bytes, gl.uint8, [WAITING, BN, D], byte_layout),
            reinterpret(v_bytes, gl.uint8, [WAITING, BN, D], byte_layout), byte_barriers, k_tiles,
            v_tiles, barriers, rows, table_ptr, rounds, window, table_stride,
        )  # fmt: skip
        widening: gl.constexpr = (
            GROUP, BLOCK_TOKENS, BN, STAGES, WINDOW, CONSUMERS, KIND, OWN_SCALES,
        )  # fmt: skip
        _begin(PDL)
        if CONSUMERS == 1:
            gl.warp_specialize(
                [(_consume, concat(queries, one)), (widen_pages, concat(bytes_of, widening)),
                 (_produce, concat(pages, byte_paging))],
                [4, 1], [96, 24],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [(_consume, concat(queries, one)), (_consume, concat(queries, other)),
                 (widen_pages, concat(bytes_of, widening)), (_produce, concat(pages, byte_paging))],
                [4, 4, 1], [208, 72, 24],
            )  # fmt: skip
    else:
        pages = concat((k_desc, v_desc, k_pages, v_pages, barriers), where)
        paging: gl.constexpr = (GROUP, BLOCK_TOKENS, BN, D, PAGE, STAGES, WINDOW, CONSUMERS)
        _begin(PDL)
        if CONSUMERS == 1:
            gl.warp_specialize(
                [(_consume, concat(queries, one)), (_produce, concat(pages, paging))], [1], [24]
            )
        else:
            gl.warp_specialize(
                [(_consume, concat(queries, one)), (_consume, concat(queries, other)),
                 (_produce, concat(pages, paging))],
                [4, 1], [240, 24],
            )  # fmt: skip


@gluon.jit
def _begin(PDL: gl.constexpr):
    """Makes barriers visible to all warps, and waits for the preceding kernel."""
    fence_async_shared()
    barrier()
    if PDL:
        wait_and_release()
