"""Pieces that the GEMV and the skinny GEMM kernel share: row maps, RMSNorm, activations, prefetch.

A gated layer (SwiGLU, GeGLU) keeps its gate rows above its up rows in one weight. Its tiles take
matching rows of both, interleaved, so that one pass yields a gate and its up side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.triton.activation import activate

__all__ = [
    "finish",
    "gdc_launch_dependents",
    "load_k",
    "norm_weight",
    "normalise",
    "prefetch_rows",
    "tile_rows",
    "wait_for_predecessor",
]


@triton.jit
def wait_for_predecessor(EAGER: tl.constexpr):
    """Waits for the preceding kernel. Before this call a kernel may read only weights, because the
    predecessor may still be writing x."""
    gdc_wait()
    if not EAGER:
        gdc_launch_dependents()


@triton.jit
def tile_rows(pid, N, BN: tl.constexpr, GLU: tl.constexpr):
    """Returns the weight rows of output tile `pid`: [BN], or [2 BN] with gate and up rows
    alternating.

    Rows past the last are clamped to it, because loading a row twice costs less than a mask. Their
    results are not stored."""
    if GLU:
        r = tl.arange(0, 2 * BN)
        rows = tl.minimum(pid * BN + r // 2, N - 1) + (r % 2) * N
    else:
        rows = tl.minimum(pid * BN + tl.arange(0, BN), N - 1)
    return rows


@triton.jit
def load_k(ptrs, k, K, EVEN_K: tl.constexpr):
    """Loads positions `k` along K. Without `EVEN_K`, positions at or beyond K are zero."""
    if EVEN_K:
        value = tl.load(ptrs)
    else:
        value = tl.load(ptrs, mask=k < K, other=0.0)
    return value


@triton.jit
def norm_weight(g_ptr, k, K, EVEN_K: tl.constexpr):
    """Returns RMSNorm weights in fp32."""
    return load_k(g_ptr + k, k, K, EVEN_K).to(tl.float32)


@triton.jit
def normalise(x, scale, g, dtype: tl.constexpr, g_dtype: tl.constexpr):
    """Returns fp32 x * scale * g, rounded in the same places as by `ops.rms_norm`.

    `g_dtype` is the dtype of the norm's weights."""
    return ((x * scale).to(g_dtype).to(tl.float32) * g).to(dtype).to(tl.float32)


@triton.jit
def finish(y, SHAPE: tl.constexpr, GLU: tl.constexpr, ACT: tl.constexpr):
    """Applies the activation. With `GLU` gate and up alternate along y's last axis, and `SHAPE` is
    the output's shape with a 2 appended."""
    if GLU:
        gate, up = tl.split(tl.reshape(y, SHAPE))
        y = activate(gate, ACT) * up
    else:
        y = activate(y, ACT)
    return y


@triton.jit
def prefetch_rows(w_ptr, rows, stride_wn, k_begin, k_end):
    """Prefetches columns [k_begin, k_end) of the given weight rows into L2.

    It takes one instruction per line of 128 bytes, and does not wait for the data. Columns past the
    end are clamped."""
    LINE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    lines = tl.arange(0, 32) * LINE
    base = w_ptr + rows.to(tl.int64)[:, None] * stride_wn
    for k in range(k_begin, k_end, 32 * LINE):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [base + tl.minimum(k + lines, k_end - 1)[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
