"""Two kernels in Triton: a norm that does three things in one pass, and attention that reads blocks
where they lie."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, width, eps, BLOCK: tl.constexpr
):  # fmt: skip
    """Handles one row, which stays in registers between its parts."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)  # a power of two: the rest is masked
    inside = at < width
    x = tl.load(x_ptr + row * width + at, mask=inside, other=0.0)
    x += tl.load(residual_ptr + row * width + at, mask=inside, other=0.0)
    tl.store(sum_ptr + row * width + at, x, mask=inside)
    x *= tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + at, x * weight, mask=inside)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual: [rows, width]. Returns their sum, and its RMSNorm."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _add_norm[(len(x),)](x, residual, weight, total, out, x.shape[1], eps, BLOCK=block)
    return total, out


@triton.jit
def _decode_attention(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, out_ptr, table_width, scale,
    KV_HEADS: tl.constexpr, SHARE: tl.constexpr, SIZE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Handles one row and one head of k and v, for the SHARE query heads that read it.

    The softmax is summed up as blocks come by: whenever a larger score turns up, what there is so
    far is scaled down (Milakov and Gimelshein, 2018; Dao et al., 2022).
    """
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    dims, places, share = tl.arange(0, DIM), tl.arange(0, SIZE), tl.arange(0, SHARE)
    queries = ((row * KV_HEADS + head) * SHARE + share)[:, None] * DIM + dims[None, :]
    q = tl.load(q_ptr + queries) * scale
    largest = tl.full([SHARE], float("-inf"), tl.float32)
    total = tl.zeros([SHARE], tl.float32)
    seen = tl.zeros([SHARE, DIM], tl.float32)
    for start in range(0, length, SIZE):
        block = tl.load(table_ptr + row * table_width + start // SIZE)
        at = ((block * SIZE + places) * KV_HEADS + head)[:, None] * DIM + dims[None, :]
        scores = tl.sum(q[:, None, :] * tl.load(k_ptr + at)[None, :, :], 2)
        scores = tl.where((start + places < length)[None, :], scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        shrink, weights = tl.exp(largest - larger), tl.exp(scores - larger[:, None])
        more = tl.sum(weights[:, :, None] * tl.load(v_ptr + at)[None, :, :], 1)
        seen, total = seen * shrink[:, None] + more, total * shrink + tl.sum(weights, 1)
        largest = larger
    tl.store(out_ptr + queries, seen / total[:, None])


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Attends from one new token of each row to all that the row has.

    q: [rows, heads, head_dim]. k, v: [blocks, block size, kv_heads, head_dim]. table: int32 [rows,
    blocks of the longest]. lengths: int32 [rows]. Returns [rows, heads, head_dim].
    """
    rows, heads, dim = q.shape
    _, size, kv_heads, _ = k.shape
    out, grid = torch.empty_like(q), (rows, kv_heads)
    shape: dict[str, Any] = {"SHARE": heads // kv_heads, "SIZE": size, "DIM": dim}
    _decode_attention[grid](
        q, k, v, table, lengths, out, table.shape[1], scale, KV_HEADS=kv_heads, **shape
    )
    return out


def capture_and_time(count: int = 100, repeats: int = 20) -> tuple[float, float]:
    """Captures `count` norms on a GPU as a graph. Returns µs launched one by one, and replayed."""
    x, residual = torch.randn(2, 4, 1024, device="cuda")
    weight = torch.randn(1024, device="cuda")

    def work() -> None:
        for _ in range(count):
            add_norm(x, residual, weight, 1e-6)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        work()  # compiles: nothing may be compiled during a capture
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # launches are written down, with their addresses, and not run
        work()
    return _microseconds(work, repeats), _microseconds(graph.replay, repeats)


def _microseconds(work: Callable[[], object], repeats: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - began) / repeats
