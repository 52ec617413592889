"""Gumbel noise for sampling, with the same words as `ops.reference.random`.

Entry v of a row comes from word v % 4 of the Philox4x32-10 counter (v // 4, position, sample index,
draw) under the row's seed. So kernels may compute any part of a row in any order."""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
# u must use the same bits of a word as in `ops.reference.random.gumbel`.
SHIFT = tl.constexpr(9)
SCALE = tl.constexpr(2.0**-23)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def gumbel(word, FAST: tl.constexpr):
    """Returns the noise of one Philox word, -log(-log u), in fp32. u is as in
    `ops.reference.random`.

    The largest noise has u near 1, where the hardware's logarithm is not precise enough. There
    -log(1 - x) is computed by a series in x = 1 - u, which is exact in fp32."""
    u = ((word >> SHIFT).to(tl.int32).to(tl.float32) + 0.5) * SCALE
    x = 1.0 - u
    series = x * (1.0 + x * (0.5 + x * (0.3333333333 + x * 0.25)))
    wait = tl.where(x < 0.015625, series, -LN2 * _log2(u, FAST))
    return -LN2 * _log2(wait, FAST)


@triton.jit
def gumbel_quads(quads, position, sample_index, draw, seed_low, seed_high, FAST: tl.constexpr):
    """Returns the noise [Q, 4] of entries 4 quads to 4 quads + 3, for quads int [Q]."""
    zero = quads * 0
    c0, c1, c2, c3 = tl.philox_impl(
        quads.to(tl.uint32), (zero + position).to(tl.uint32), (zero + sample_index).to(tl.uint32),
        (zero + draw).to(tl.uint32), (zero + seed_low).to(tl.uint32),
        (zero + seed_high).to(tl.uint32),
    )  # fmt: skip
    pairs = tl.join(tl.join(c0, c2), tl.join(c1, c3))
    return gumbel(tl.reshape(pairs, [quads.shape[0], 4]), FAST)


@triton.jit
def gumbel_at(entry, position, sample_index, draw, seed_low, seed_high, FAST: tl.constexpr):
    """Returns the noise [M] of vocabulary entries, int [M], in any order."""
    zero = entry * 0
    c0, c1, c2, c3 = tl.philox_impl(
        (entry // 4).to(tl.uint32), (zero + position).to(tl.uint32),
        (zero + sample_index).to(tl.uint32), (zero + draw).to(tl.uint32),
        (zero + seed_low).to(tl.uint32), (zero + seed_high).to(tl.uint32),
    )  # fmt: skip
    place = entry % 4
    word = tl.where(place < 2, tl.where(place == 0, c0, c1), tl.where(place == 2, c2, c3))
    return gumbel(word, FAST)
