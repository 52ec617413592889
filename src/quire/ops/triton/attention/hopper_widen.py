"""A part of the kernel of `hopper_kernel.py`: a warpgroup that widens bytes to fp16.

It reads tiles of bytes from rings in shared memory, multiplies them by their scales, and writes
them to the rings of 16-bit tiles. So the warpgroups that attend need no other code for 8 bits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quire.ops.triton.attention.hopper_tiles import item_at
from quire.ops.triton.attention.kv8 import INT8
from quire.ops.triton.hopper_common import barrier

TOKENS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""Layout of scales: one token per thread."""
WIDEN_E4M3 = gl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 a, b, unit;
    mov.b32 unit, 0x1c001c00;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 a, low;
    cvt.rn.f16x2.e4m3x2 b, high;
    mul.rn.f16x2 a, a, unit;
    mul.rn.f16x2 b, b, unit;
    mul.rn.f16x2 $0, a, $3;
    mul.rn.f16x2 $1, b, $4;
}""")
"""Widens four floats to value / 256, and multiplies them by $3 and $4. These are scales times 256,
because fp16 holds small scales less precisely."""
WIDEN_INT8 = gl.constexpr("""{
    .reg .b32 a, unit, offset;
    mov.b32 unit, 0x20002000;
    mov.b32 offset, 0xc880c880;
    prmt.b32 a, $2, 0x64646464, 0x4140;
    fma.rn.f16x2 a, a, unit, offset;
    mul.rn.f16x2 $0, a, $3;
    prmt.b32 a, $2, 0x64646464, 0x4342;
    fma.rn.f16x2 a, a, unit, offset;
    mul.rn.f16x2 $1, a, $4;
}""")
"""Widens four integers to value / 128, and multiplies them by $3 and $4. An fp16 of 1024 plus a
byte has that byte as its low byte."""


@gluon.constexpr_function
def _lines(tokens: int, columns: int) -> gl.BlockedLayout:
    """Returns the layout of a tile. Eight threads have a token's scale and write 128 bytes."""
    threads = columns // 8
    return gl.BlockedLayout([tokens * threads // 128, 8], [32 // threads, threads], [4, 1], [1, 0])


@gluon.jit
def _stored(position, begin, length, BN: gl.constexpr):
    """Returns the tokens of the tile at `position`, and a mask of those that queries may see."""
    at = position + gl.arange(0, BN, layout=TOKENS)
    return at, (at >= begin) & (at < length)


@gluon.jit
def _ask_blocks(
    table, position, begin, length,
    BN: gl.constexpr, BLOCK_TOKENS: gl.constexpr, OWN_SCALES: gl.constexpr,
):  # fmt: skip
    """Returns the blocks of the tile's tokens, which are needed if tokens have their own scales."""
    at, stored = _stored(position, begin, length, BN)
    blocks = at
    if OWN_SCALES:
        blocks = gl.load(table + at // BLOCK_TOKENS, mask=stored, other=0)
    return blocks


@gluon.jit
def _ask_scales(
    scales, blocks, head, position, begin, length,
    BN: gl.constexpr, BLOCK_TOKENS: gl.constexpr, OWN_SCALES: gl.constexpr,
):  # fmt: skip
    """Returns the scales of the tile's K and V, 0 for tokens that no query sees."""
    k_scale_ptr, v_scale_ptr, block_stride, head_stride = scales
    at, stored = _stored(position, begin, length, BN)
    place = at * 0 + head
    if OWN_SCALES:
        place = blocks.to(gl.int64) * block_stride + head * head_stride + at % BLOCK_TOKENS
    k_scale = gl.load(k_scale_ptr + place, mask=stored, other=0.0)
    return k_scale, gl.load(v_scale_ptr + place, mask=stored, other=0.0)


@gluon.jit
def _widen(
    scale, bytes_of, full_bytes, empty_bytes, tiles, full, empty, i, STAGES: gl.constexpr,
    INTEGERS: gl.constexpr,
):  # fmt: skip
    """Widens tile i of a ring."""
    layout: gl.constexpr = _lines(bytes_of.shape[1], bytes_of.shape[2])
    asm: gl.constexpr = WIDEN_INT8 if INTEGERS else WIDEN_E4M3
    unit: gl.constexpr = 128.0 if INTEGERS else 256.0
    WAITING: gl.constexpr = bytes_of.shape[0]
    stage = i % STAGES
    waiting = i % WAITING
    factors = gl.convert_layout((scale * unit).to(gl.float16), gl.SliceLayout(1, layout))
    mbarrier.wait(full_bytes.index(waiting), (i // WAITING) & 1)
    mbarrier.wait(empty.index(stage), (i // STAGES + 1) & 1)
    x = bytes_of.index(waiting).load(layout)
    factors, _ = gl.broadcast(factors[:, None], x)
    x = gl.inline_asm_elementwise(
        asm, "=&r,=&r,r,r,r", [x, factors], dtype=gl.float16, is_pure=True, pack=4
    )
    tiles.index(stage).store(x)
    fence_async_shared()
    barrier()
    mbarrier.arrive(empty_bytes.index(waiting))
    mbarrier.arrive(full.index(stage))


@gluon.jit
def widen_pages(
    scales, k_bytes, v_bytes, byte_barriers, k_tiles, v_tiles, barriers, rows, table_ptr, rounds,
    window, table_stride,
    GROUP: gl.constexpr, BLOCK_TOKENS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    WINDOW: gl.constexpr, CONSUMERS: gl.constexpr, KIND: gl.constexpr, OWN_SCALES: gl.constexpr,
):  # fmt: skip
    """Widens all tiles that the program's queries attend to.

    Args:
        scales: float32 scales of K and of V, with their block and head strides. Without OWN_SCALES
            there is one scale for each head.
    """
    INTEGERS: gl.constexpr = KIND == INT8
    full_k_bytes, full_v_bytes, empty_k_bytes, empty_v_bytes = byte_barriers
    full_k, full_v, empty_k, empty_v = barriers
    done = 0
    for index in range(rounds):
        head, row, _, _, _, length, _, _, begin, low, count = item_at(
            index, rows, window, GROUP, BN, WINDOW, CONSUMERS
        )
        table = table_ptr + row.to(gl.int64) * table_stride
        top = (low + count - 1) * BN
        blocks = _ask_blocks(table, top, begin, length, BN, BLOCK_TOKENS, OWN_SCALES)
        k_scale, v_scale = _ask_scales(
            scales, blocks, head, top, begin, length, BN, BLOCK_TOKENS, OWN_SCALES
        )
        blocks = _ask_blocks(table, top - BN, begin, length, BN, BLOCK_TOKENS, OWN_SCALES)
        # Starting from `v_scale` itself would not work: if two names begin with one value and one
        # is later assigned to the other, Triton 3.6 keeps the first value.
        v_before = gl.zeros_like(v_scale)
        # The loop follows the order in which bytes arrive. Scales are loaded a tile ahead, and
        # their addresses two tiles ahead.
        for i in range(done, done + count + 1):
            ahead = top - (i + 1 - done) * BN
            k_ahead, v_ahead = _ask_scales(
                scales, blocks, head, ahead, begin, length, BN, BLOCK_TOKENS, OWN_SCALES
            )
            blocks = _ask_blocks(table, ahead - BN, begin, length, BN, BLOCK_TOKENS, OWN_SCALES)
            if i < done + count:
                _widen(
                    k_scale, k_bytes, full_k_bytes, empty_k_bytes, k_tiles, full_k, empty_k, i,
                    STAGES, INTEGERS,
                )  # fmt: skip
            if i > done:
                _widen(
                    v_before, v_bytes, full_v_bytes, empty_v_bytes, v_tiles, full_v, empty_v, i - 1,
                    STAGES, INTEGERS,
                )  # fmt: skip
            v_before = v_scale
            k_scale = k_ahead
            v_scale = v_ahead
        done += count
