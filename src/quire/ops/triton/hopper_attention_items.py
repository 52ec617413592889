"""Chooses the tiles of queries that a program of `hopper_attention_kernel.py` takes, in order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.ops.triton.hopper_attention_tiles import ROWS

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
def item_at(
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
