"""Words of single threads: loads of neighbours, shared memory that Triton does not manage, and
exchange between the lanes of a warp, in inline assembly.

Addresses of shared memory are int32 offsets, as the instructions take them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def larger(a, b):
    """Returns the larger magnitudes of two pairs of bf16 numbers, NaN if one is."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def of_lane(x, ASM: tl.constexpr):
    """Returns what an instruction makes of int32 x of each thread."""
    return tl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def of_other_lane(x, BIT: tl.constexpr):
    """Returns int32 x of the lane whose number differs in one bit."""
    return tl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r",
        [x, tl.full(x.shape, BIT, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def of_quarter(x, INDEX: tl.constexpr):
    """Returns int32 x of one of each four threads."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1c1f, 0xffffffff;", "=r,r,r",
        [x, tl.full(x.shape, INDEX, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def _load(count: int, space: str, when: bool) -> str:
    """Returns instructions that load neighbouring words of each thread; with `when`, 0 where the
    last operand is 0."""
    outs = [f"${index}" for index in range(count)]
    vector = f"v{count}.b32 {{{', '.join(outs)}}}" if count > 1 else "b32 $0"
    load = f"ld.{space}.{vector}, [${count}];"
    if not when:
        return load
    zero = " ".join(f"mov.b32 {out}, 0;" for out in outs)
    return f"{{\n.reg .pred p;\nsetp.ne.s32 p, ${count + 1}, 0;\n{zero}\n@p {load}\n}}"


_LOAD4 = tl.constexpr(_load(4, "global", False))
_LOAD4_IF = tl.constexpr(_load(4, "global", True))
_LOAD2 = tl.constexpr(_load(2, "global", False))
_LOAD2_IF = tl.constexpr(_load(2, "global", True))
_LOAD1 = tl.constexpr(_load(1, "global", False))
_LOAD1_IF = tl.constexpr(_load(1, "global", True))
_SHARED4 = tl.constexpr(_load(4, "shared", False))
_SHARED2 = tl.constexpr(_load(2, "shared", False))
_SHARED1 = tl.constexpr(_load(1, "shared", False))


@triton.jit
def load_four(pointers, wanted, EVEN: tl.constexpr):
    """Returns four neighbouring words; unless EVEN, 0 where they are not `wanted`."""
    if EVEN:
        words = tl.inline_asm_elementwise(
            _LOAD4, "=r,=r,=r,=r,l", [pointers],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            _LOAD4_IF, "=&r,=&r,=&r,=&r,l,r", [pointers, wanted],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def load_two(pointers, wanted, EVEN: tl.constexpr):
    """Returns two neighbouring words; unless EVEN, 0 where they are not `wanted`."""
    if EVEN:
        words = tl.inline_asm_elementwise(
            _LOAD2, "=r,=r,l", [pointers], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
    else:
        words = tl.inline_asm_elementwise(
            _LOAD2_IF, "=&r,=&r,l,r", [pointers, wanted], dtype=(tl.int32, tl.int32),
            is_pure=False, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def load_one(pointers, wanted, EVEN: tl.constexpr):
    """Returns a word; unless EVEN, 0 where it is not `wanted`."""
    if EVEN:
        word = tl.inline_asm_elementwise(
            _LOAD1, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        word = tl.inline_asm_elementwise(
            _LOAD1_IF, "=&r,l,r", [pointers, wanted], dtype=tl.int32, is_pure=False, pack=1
        )
    return word


@triton.jit
def kept_four(address):
    """Returns four neighbouring words of shared memory."""
    return tl.inline_asm_elementwise(
        _SHARED4, "=r,=r,=r,=r,r", [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def kept_two(address):
    """Returns two neighbouring words of shared memory."""
    return tl.inline_asm_elementwise(
        _SHARED2, "=r,=r,r", [address], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
    )


@triton.jit
def kept_float(address):
    """Returns a float32 of shared memory."""
    return tl.inline_asm_elementwise(
        _SHARED1, "=r,r", [address], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def keep_float(address, x):
    """Stores a float32 in shared memory."""
    tl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.u32 $0, 0;", "=r,r,r", [address, x], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def keep_four(address, wanted, a, b, c, d):
    """Stores four neighbouring words in shared memory, where they are `wanted`."""
    tl.inline_asm_elementwise(
        "{\n.reg .pred p;\nsetp.ne.s32 p, $2, 0;\n@p st.shared.v4.b32 [$1], {$3, $4, $5, $6};\n"
        "mov.u32 $0, 0;\n}",
        "=r,r,r,r,r,r,r", [address, wanted, a, b, c, d], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def keep_two(address, wanted, a, b):
    """Stores two neighbouring words in shared memory, where they are `wanted`."""
    tl.inline_asm_elementwise(
        "{\n.reg .pred p;\nsetp.ne.s32 p, $2, 0;\n@p st.shared.v2.b32 [$1], {$3, $4};\n"
        "mov.u32 $0, 0;\n}",
        "=r,r,r,r,r", [address, wanted, a, b], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def low_halves(pairs):
    """Returns the first of each pair of bf16 numbers, as fp32."""
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_halves(pairs):
    """Returns the second of each pair of bf16 numbers, as fp32."""
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton.jit
def add_squares(squares, pairs):
    """Returns squares plus those of pairs of bf16 numbers."""
    low = low_halves(pairs)
    high = high_halves(pairs)
    return squares + low * low + high * high


@triton.jit
def sum_of_warps(shared, thread, WARPS: tl.constexpr):
    """Returns sums over warps of what their threads keep there, to all of them."""
    total = kept_float(shared + thread % 32 * 4)
    for warp in tl.static_range(1, WARPS):
        total += kept_float(shared + warp * 128 + thread % 32 * 4)
    return total


@triton.jit
def sum_of_lanes(x):
    """Returns sums of fp32 over each warp."""
    for step in tl.static_range(5):
        bits = x.to(tl.int32, bitcast=True)
        x += of_other_lane(bits, 1 << step).to(tl.float32, bitcast=True)
    return x
