"""The kernel of `hopper_attention.py`: tiles of queries against paged KV by TMA and wgmma.

A program walks over tiles of 128 (token, head) pairs. One warp copies pages of K and V into rings
in shared memory, ahead of two warpgroups that have 64 of the pairs each; where no row has more than
64, of one. While a warpgroup makes
weights of one KV tile's scores, the tensor cores multiply the preceding tile's weights by its
values, and work for the other warpgroup (FlashAttention-3, Shah et al., 2024). KV is taken from its
end on down. The next tile's queries and KV are fetched meanwhile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

from quire.ops.triton.hopper_attention_tiles import COLUMNS, ROWS, ask_queries, attend_tiles
from quire.ops.triton.hopper_common import wait_and_release

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
def _item(
    index, rows, window, GROUP: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Returns of the program's tile number `index`: KV head, row, which of the row's tiles it is,
    where the row's queries begin, how many, the row's length, the tile's first and last position,
    the first position that counts, the first KV tile, and how many. Of a tile that is none there
    are no queries and no KV."""
    BM: gl.constexpr = CONSUMERS * ROWS
    query_start_ptr, seq_lens_ptr, num_rows, kv_heads, most, shortest = rows
    # The last tiles of a causal prompt are the longest: they come first. Every other round goes
    # backwards, so that programs have about equal sums.
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


@gluon.jit
def _copy_tile(
    desc, bar, pages, stage, table_ptr, position, first_page, last_page, head_row, block_rows,
    BLOCK_TOKENS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Asks for the KV tile at `position`. Pages outside [first_page, last_page] may not be stored:
    the nearest one stands for them."""
    PAGES: gl.constexpr = BN // PAGE
    PARTS: gl.constexpr = D // COLUMNS
    mbarrier.expect(bar, BN * D * 2)
    for page in gl.static_range(PAGES):
        at = position + page * PAGE
        index = gl.minimum(gl.maximum(at // BLOCK_TOKENS, first_page), last_page)
        row = gl.load(table_ptr + index) * block_rows + head_row + at % BLOCK_TOKENS
        for part in gl.static_range(PARTS):
            tma.async_copy_global_to_shared(
                desc, [row, part * COLUMNS], bar,
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
        head, row, _, _, _, length, _, _, begin, low, count = _item(
            index, rows, window, GROUP, BN, WINDOW, CONSUMERS
        )
        table = table_ptr + row.to(gl.int64) * table_stride
        first_page = begin // BLOCK_TOKENS
        last_page = (length - 1) // BLOCK_TOKENS
        for i in range(done, done + count):
            stage = i % STAGES
            phase = (i // STAGES + 1) & 1
            position = (low + count - 1 + done - i) * BN
            mbarrier.wait(empty_k.index(stage), phase)
            _copy_tile(
                k_desc, full_k.index(stage), k_pages, stage, table, position, first_page,
                last_page, head * k_head_rows, k_block_rows, BLOCK_TOKENS, BN, D, PAGE,
            )  # fmt: skip
            mbarrier.wait(empty_v.index(stage), phase)
            _copy_tile(
                v_desc, full_v.index(stage), v_pages, stage, table, position, first_page,
                last_page, head * v_head_rows, v_block_rows, BLOCK_TOKENS, BN, D, PAGE,
            )  # fmt: skip
        done += count


@gluon.jit
def _consume(
    q_ptr, out_ptr, sinks_ptr, q_tiles, rings, rows, rounds, numbers, strides,
    GROUP: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr,
    SINKS: gl.constexpr, CONSUMERS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    q_stride_t, q_stride_h, out_stride_t, out_stride_h = strides
    done = 0
    item = _item(0, rows, numbers[2], GROUP, BN, WINDOW, CONSUMERS)
    base = (item[2] * CONSUMERS + WHICH) * ROWS
    ask_queries(
        q_ptr, q_tiles.index(WHICH), base, item[0], item[3], item[4], q_stride_t, q_stride_h,
        GROUP, D,
    )  # fmt: skip
    for index in range(rounds):
        ahead = item
        ahead_base = base
        if index + 1 < rounds:
            ahead = _item(index + 1, rows, numbers[2], GROUP, BN, WINDOW, CONSUMERS)
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
                GROUP, BN, D, PAGE, STAGES, SOFTCAP, WINDOW, SINKS,
            )  # fmt: skip
        done += item[10]
        item = ahead
        base = ahead_base
    async_copy.wait_group(0)


SIZES = ["num_rows", "kv_heads", "most", "rounds", "shortest", "window", "table_stride"]
"""One compilation for all of them."""


@gluon.jit(do_not_specialize=SIZES)
def attend_pages(
    q_ptr, k_desc, v_desc, sinks_ptr, out_ptr, query_start_ptr, seq_lens_ptr, table_ptr, num_rows,
    kv_heads, most, rounds, shortest, qk_scale, softcap, window, q_stride_t, q_stride_h,
    out_stride_t, out_stride_h, k_block_rows, k_head_rows, v_block_rows, v_head_rows, table_stride,
    GROUP: gl.constexpr, D: gl.constexpr, BLOCK_TOKENS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr,
    SINKS: gl.constexpr, CONSUMERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Rows of at least `shortest` queries, in tiles of CONSUMERS * ROWS pairs. Each program takes
    `rounds` of the `most` tiles of each KV head. k_desc, v_desc: of the pool as rows of D values,
    in boxes of a page, or a KV tile if that is smaller. k_block_rows: such rows from a block to the
    next; k_head_rows: from a head to the next."""
    PAGE: gl.constexpr = BLOCK_TOKENS if BLOCK_TOKENS < BN else BN
    PIECES: gl.constexpr = STAGES * (D // COLUMNS) * (BN // PAGE)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_tiles = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, ROWS, D], layout)
    k_pages = gl.allocate_shared_memory(dtype, [PIECES, PAGE, COLUMNS], layout)
    v_pages = gl.allocate_shared_memory(dtype, [PIECES, PAGE, COLUMNS], layout)
    k_tiles = k_pages._reinterpret(dtype, [STAGES, BN, D], layout)
    v_tiles = v_pages._reinterpret(dtype, [STAGES, BN, D], layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_k.index(stage), count=1)
        mbarrier.init(full_v.index(stage), count=1)
        mbarrier.init(empty_k.index(stage), count=CONSUMERS)
        mbarrier.init(empty_v.index(stage), count=CONSUMERS)
    fence_async_shared()
    gl.thread_barrier()
    if PDL:
        wait_and_release()
    rows = (query_start_ptr, seq_lens_ptr, num_rows, kv_heads, most, shortest)
    barriers = (full_k, full_v, empty_k, empty_v)
    queries = (
        q_ptr, out_ptr, sinks_ptr, q_tiles, (k_tiles, v_tiles) + barriers, rows, rounds,
        (qk_scale, softcap, window), (q_stride_t, q_stride_h, out_stride_t, out_stride_h),
    )  # fmt: skip
    pages = (
        k_desc, v_desc, k_pages, v_pages, barriers, rows, table_ptr, rounds, window, table_stride,
        k_block_rows, k_head_rows, v_block_rows, v_head_rows,
    )  # fmt: skip
    one: gl.constexpr = (GROUP, BN, D, PAGE, STAGES, SOFTCAP, WINDOW, SINKS, CONSUMERS, 0)
    other: gl.constexpr = (GROUP, BN, D, PAGE, STAGES, SOFTCAP, WINDOW, SINKS, CONSUMERS, 1)
    paging: gl.constexpr = (GROUP, BLOCK_TOKENS, BN, D, PAGE, STAGES, WINDOW, CONSUMERS)
    # What the copying warp does not need of the registers goes to the others.
    if CONSUMERS == 1:
        gl.warp_specialize([(_consume, queries + one), (_produce, pages + paging)], [1], [24])
    else:
        gl.warp_specialize(
            [(_consume, queries + one), (_consume, queries + other), (_produce, pages + paging)],
            [4, 1], [240, 24],
        )  # fmt: skip
