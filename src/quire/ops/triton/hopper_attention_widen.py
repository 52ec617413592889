"""A part of the kernel of `hopper_attention_kernel.py`: a warpgroup that makes fp16 of bytes.

It takes tiles of bytes from rings of one stage in shared memory, times their scales, to the rings
that tiles of 16 bits would be copied to. Those who attend see no difference.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from quire.ops.triton.hopper_attention_items import item_at
from quire.ops.triton.kv8 import INT8

LINES = gl.constexpr(32)
"""Tokens that are under way in registers: a quarter of a tile."""
WIDEN_E4M3 = gl.constexpr("""{
    .reg .b32 a, b;
    prmt.b32 a, $2, 0, 0x1404;
    shr.u32 b, a, 1;
    lop3.b32 a, a, b, 0x80008000, 0xE4;
    and.b32 a, a, 0xbf80bf80;
    mul.rn.f16x2 $0, a, $3;
    prmt.b32 a, $2, 0, 0x3424;
    shr.u32 b, a, 1;
    lop3.b32 a, a, b, 0x80008000, 0xE4;
    and.b32 a, a, 0xbf80bf80;
    mul.rn.f16x2 $1, a, $4;
}""")
"""Four floats over 256, as shifting makes fp16 of them, times what is $3 and $4."""
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
"""The same for integers over 128: 1024 plus a byte is an fp16 of which that byte is the low one."""


@gluon.constexpr_function
def _lines(columns: int) -> gl.BlockedLayout:
    """The layout of the warpgroup: 16 bytes a thread."""
    return gl.BlockedLayout([1, 16], [512 // columns, columns // 16], [4, 1], [1, 0])


@gluon.jit
def _factors_of_lines(
    scale_ptr, table, strides, head, position, begin, length,
    BLOCK_TOKENS: gl.constexpr, D: gl.constexpr, OWN_SCALES: gl.constexpr, INTEGERS: gl.constexpr,
):  # fmt: skip
    """Returns what LINES tokens' values are multiplied by. Of tokens that are not stored, nothing
    is left."""
    unit: gl.constexpr = 128.0 if INTEGERS else 256.0
    block_stride, head_stride = strides
    at = position + gl.arange(0, LINES, layout=gl.SliceLayout(1, _lines(D)))
    stored = at < length
    if OWN_SCALES:
        block = gl.load(table + gl.maximum(at, begin) // BLOCK_TOKENS, mask=stored, other=0)
        place = block.to(gl.int64) * block_stride + head * head_stride + at % BLOCK_TOKENS
    else:
        place = at * 0 + head
    return (gl.load(scale_ptr + place, mask=stored, other=0.0) * unit).to(gl.float16)


@gluon.jit
def _factors(
    scale_ptr, table, strides, head, position, begin, length,
    BLOCK_TOKENS: gl.constexpr, D: gl.constexpr, OWN_SCALES: gl.constexpr, INTEGERS: gl.constexpr,
):  # fmt: skip
    """Returns what the values of the tile at `position` are multiplied by, LINES tokens each."""
    return (
        _factors_of_lines(
            scale_ptr, table, strides, head, position, begin, length,
            BLOCK_TOKENS, D, OWN_SCALES, INTEGERS,
        ),
        _factors_of_lines(
            scale_ptr, table, strides, head, position + LINES, begin, length,
            BLOCK_TOKENS, D, OWN_SCALES, INTEGERS,
        ),
        _factors_of_lines(
            scale_ptr, table, strides, head, position + 2 * LINES, begin, length,
            BLOCK_TOKENS, D, OWN_SCALES, INTEGERS,
        ),
        _factors_of_lines(
            scale_ptr, table, strides, head, position + 3 * LINES, begin, length,
            BLOCK_TOKENS, D, OWN_SCALES, INTEGERS,
        ),
    )  # fmt: skip


@gluon.jit
def _widen(
    factors, bytes_of, full_bytes, empty_bytes, tiles, full, empty, i, STAGES: gl.constexpr,
    INTEGERS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Makes tile i of a ring."""
    stage = i % STAGES
    asm: gl.constexpr = WIDEN_INT8 if INTEGERS else WIDEN_E4M3
    mbarrier.wait(full_bytes.index(0), i & 1)
    mbarrier.wait(empty.index(stage), (i // STAGES + 1) & 1)
    for part in gl.static_range(4):
        x = bytes_of.index(0).slice(part * LINES, LINES).load(_lines(D))
        times, _ = gl.broadcast(factors[part][:, None], x)
        x = gl.inline_asm_elementwise(
            asm, "=&r,=&r,r,r,r", [x, times], dtype=gl.float16, is_pure=True, pack=4
        )
        tiles.index(stage).slice(part * LINES, LINES).store(x)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(empty_bytes.index(0))
    mbarrier.arrive(full.index(stage))


@gluon.jit
def widen_pages(
    scales, k_bytes, v_bytes, byte_barriers, k_tiles, v_tiles, barriers, rows, table_ptr, rounds,
    window, table_stride,
    GROUP: gl.constexpr, BLOCK_TOKENS: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, CONSUMERS: gl.constexpr, KIND: gl.constexpr,
    OWN_SCALES: gl.constexpr,
):  # fmt: skip
    """Makes all tiles that the program's queries attend to. scales: of K and of V, float32, and
    their strides of blocks and heads; without OWN_SCALES of heads alone."""
    INTEGERS: gl.constexpr = KIND == INT8
    k_scale_ptr, v_scale_ptr, strides = scales
    full_k_bytes, full_v_bytes, empty_k_bytes, empty_v_bytes = byte_barriers
    full_k, full_v, empty_k, empty_v = barriers
    done = 0
    for index in range(rounds):
        head, row, _, _, _, length, _, _, begin, low, count = item_at(
            index, rows, window, GROUP, BN, WINDOW, CONSUMERS
        )
        table = table_ptr + row.to(gl.int64) * table_stride
        for i in range(done, done + count):
            position = (low + count - 1 + done - i) * BN
            k_factors = _factors(
                k_scale_ptr, table, strides, head, position, begin, length,
                BLOCK_TOKENS, D, OWN_SCALES, INTEGERS,
            )  # fmt: skip
            v_factors = _factors(
                v_scale_ptr, table, strides, head, position, begin, length,
                BLOCK_TOKENS, D, OWN_SCALES, INTEGERS,
            )  # fmt: skip
            _widen(
                k_factors, k_bytes, full_k_bytes, empty_k_bytes, k_tiles, full_k, empty_k, i,
                STAGES, INTEGERS, D,
            )  # fmt: skip
            _widen(
                v_factors, v_bytes, full_v_bytes, empty_v_bytes, v_tiles, full_v, empty_v, i,
                STAGES, INTEGERS, D,
            )  # fmt: skip
        done += count
