"""Times the linear layers and the attention of `--deterministic` on a GPU, after checks to the bit.

    python bench/kernels/fixed_products.py

The checks say which tiles have the same bits. Times are µs of a call in a CUDA graph of calls whose
weights lie in memory, not in L2, norms of their own included, beside those without
`--deterministic`. A table ends the output.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from timing import DEVICE, copies_beyond_l2, graph_us

from quire.ops.arguments import RmsScale
from quire.ops.choose import Policy, current_policy, use_policy
from quire.ops.kv import KVLayer
from quire.ops.triton.attention import attention
from quire.ops.triton.collectives.segments import SumPlan, segment_sum
from quire.ops.triton.launch import compiling
from quire.ops.triton.linear import linear
from quire.ops.triton.products import small
from quire.ops.triton.products.plan import GemmPlan, LinearArgs
from quire.ops.weight import Weight

ROWS = (1, 16, 64, 128, 256, 512, 2048, 8192)
MODELS = {
    "0.6B": {"qkv": (4096, 1024), "up": (6144, 1024), "o": (1024, 2048), "down": (1024, 3072),
             "head": (151936, 1024)},
    "8B": {"qkv": (6144, 4096), "up": (24576, 4096), "o": (4096, 4096), "down": (4096, 12288)},
}  # fmt: skip
TILES = [
    (64, 64, 64, 3, 4, False), (64, 64, 64, 3, 4, True), (16, 64, 128, 4, 4, True),
    (32, 64, 128, 3, 4, True), (128, 64, 64, 3, 8, True), (256, 128, 64, 3, 8, True),
    (128, 128, 32, 3, 8, True), (64, 32, 128, 3, 4, False), (128, 128, 64, 4, 4, False),
    (16, 32, 64, 3, 4, False), (8, 64, 64, 3, 4, True), (16, 64, 64, 3, 1, False),
]  # fmt: skip
"""Rows, outputs, inputs of a step, stages, warps, and whether weights are the left operand. The
last three are multiplied by `mma.sync`, the others by `wgmma`."""
FIXED, PLAIN = Policy(deterministic=True), Policy()
START = time.monotonic()


def say(*words: object) -> None:
    print(f"{time.monotonic() - START:6.1f}", *words, flush=True)


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def check_tiles() -> None:
    """Tells which tiles have the bits of the first one."""
    for dtype in (torch.bfloat16, torch.float16):
        wide = torch.exp2(torch.randn(256, 1024, device=DEVICE) * 3)
        x = (torch.randn(256, 1024, device=DEVICE) * wide).to(dtype)
        args = LinearArgs(x, Weight.plain(random(512, 1024, scale=0.03, dtype=dtype)))
        plans = [
            GemmPlan("skinny", bm=bm, bn=bn, bk=bk, stages=stages, warps=warps, swap=swap)
            for bm, bn, bk, stages, warps, swap in TILES
        ]
        with compiling(16):
            for plan in plans:
                small.run(args, plan, out_dtype=torch.float32)
        found = [small.run(args, plan, out_dtype=torch.float32) for plan in plans]
        same = [torch.equal(y, found[0]) for y in found]
        say(f"tiles with the first one's bits, {dtype}: {sum(same)} of {len(same)}")
        for tile, equal in zip(TILES, same, strict=True):
            if not equal:
                say("other bits:", tile)


def check_sums() -> None:
    x, weight = random(700, 3072), Weight.plain(random(1024, 3072, scale=0.02))
    residual = random(700, 1024)

    def run(n: int, plan: SumPlan | None) -> Tensor:
        return segment_sum(x[:n], weight, 8, torch.bfloat16, None, residual[:n], plan=plan)

    want = run(700, SumPlan(64, 64, 64))
    wrong = [
        n for n in (1, 5, 16, 33, 64, 100, 300, 700) if not torch.equal(run(n, None), want[:n])
    ]
    say("numbers of rows whose sums of segments have other bits:", wrong)


def pool(rows: int, length: int, dim: int = 128, kv_heads: int = 8) -> tuple[KVLayer, Tensor]:
    each = -(-length // 16)
    k, v = (random(rows * each, kv_heads, 16, dim) for _ in range(2))
    table = torch.randperm(rows * each, device=DEVICE, dtype=torch.int32).view(rows, each)
    return KVLayer(k, v), table


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(DEVICE)


def check_attention() -> None:
    """Compares attention of parts of a prompt, and of single tokens, to that of the whole."""
    shapes: list[tuple[str, dict[str, object], int, int]] = [
        ("plain", {}, 128, 2), ("heads of 64", {}, 64, 4), ("window", {"window": 100}, 128, 4),
        ("softcap", {"softcap": 30.0}, 128, 2), ("sinks", {"sinks": random(64)}, 64, 8),
        ("groups of 7", {}, 128, 7),
    ]  # fmt: skip
    length = 700
    pending = []
    for name, more, dim, group in shapes:
        kv, table = pool(3, length, dim)
        q, other = random(length, 8 * group, dim), random(34, 8 * group, dim)

        def attend(
            q: Tensor, lens: list[int], seq: list[int], table: Tensor, kv: KVLayer = kv,
            dim: int = dim, more: dict = more,
        ) -> Tensor:  # fmt: skip
            starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
            return attention.paged_attention(
                q, kv, _ints(starts), _ints(seq), table, max_q_len=max(lens), max_seq_len=length,
                scale=dim**-0.5, tuning=attention.FIXED, **more,
            )  # fmt: skip

        order = torch.stack((table[1], table[0], table[2]))
        pending.append((name, q, other, table, order, attend))
    with compiling(16):
        for _, q, _, table, _, attend in pending:
            attend(q, [length], [length], table[:1])
            attend(q[:1], [1], [1], table[:1])
    for name, q, other, table, order, attend in pending:
        whole = attend(q, [length], [length], table[:1])
        wrong: list[tuple[int, int]] = []
        for chunk in (1, 97, 300):
            for first in range(0, length, 61 if chunk == 1 else chunk):
                n = min(chunk, length - first)
                mixed = torch.cat((other[:33], q[first : first + n], other[33:34]))
                out = attend(mixed, [33, n, 1], [233, first + n, 650], order)
                if not torch.equal(out[33 : 33 + n], whole[first : first + n]):
                    wrong.append((chunk, first))
        for first in range(0, length, 7):
            alone = attend(q[first : first + 1], [1], [first + 1], table[:1])
            trio = torch.cat((other[:1], q[first : first + 1], other[1:2]))
            among = attend(trio, [1, 1, 1], [233, first + 1, 650], order)
            if not (torch.equal(alone[0], whole[first]) and torch.equal(among[1], whole[first])):
                wrong.append((0, first))
        say(f"attention, {name}: parts with other bits:", wrong)


def time_attention() -> None:
    cases = {"b1": (1, 1, 384), "b8": (8, 1, 640), "64 short": (64, 1, 150), "b64": (64, 1, 640),
             "b256": (256, 1, 640), "512": (1, 512, 512), "8192": (1, 8192, 8192)}  # fmt: skip
    for name, (rows, n, length) in cases.items():
        kv, table = pool(rows, length)
        q = random(rows * n, 16, 128)
        starts = torch.arange(0, rows * n + 1, n, dtype=torch.int32).to(DEVICE)
        seq = torch.full((rows,), length, dtype=torch.int32).to(DEVICE)
        row = []
        for tuning, few in ((attention.DEFAULT, 64), (attention.FIXED, 0), (attention.FIXED, 64)):
            attention._SHORT_TILE, kept = few, attention._SHORT_TILE
            made = attention.attention_schedule(
                starts, seq, heads=16, kv_heads=8, head_dim=128, dtype=q.dtype,
                kv_format=kv.format, tokens=rows * n, max_q_len=n, tuning=tuning,
            )  # fmt: skip

            def call(tuning=tuning, q=q, kv=kv, table=table, made=made, n=n, length=length,  # type: ignore[no-untyped-def]
                     starts=starts, seq=seq) -> Tensor:  # fmt: skip
                return attention.paged_attention(
                    q, kv, starts, seq, table, max_q_len=n, max_seq_len=length, scale=0.09,
                    tuning=tuning, scratch={"schedule": made},
                )  # fmt: skip

            row.append(graph_us([call], 2.0, 16 if n < 1000 else 2))
            attention._SHORT_TILE = kept
        say(f"attention {name}: plain {row[0]:.1f}, fixed by two warpgroups {row[1]:.1f}, "
            f"by as many as there are queries for {row[2]:.1f} us")  # fmt: skip


def layer_calls(name: str, n: int, k: int, rows: int) -> list[Callable[[], Tensor]]:
    """Returns the calls on copies of a layer."""
    copies = copies_beyond_l2(2 * n * k, 8) if rows <= 512 else 2
    weights = [Weight.plain(random(n, k, scale=k**-0.5)) for _ in range(copies)]
    x, residual = random(rows, k), random(rows, n)
    norm = RmsScale(torch.ones(k, device=DEVICE, dtype=x.dtype), 1e-6)
    if name in ("o", "down"):
        return [lambda w=w: _row_parallel(x, w, residual) for w in weights]  # type: ignore[misc]
    if name == "head":
        return [lambda w=w: linear(x, w) for w in weights]  # type: ignore[misc]
    act = "silu_and_mul" if name == "up" else None
    return [lambda w=w: linear(x, w, norm=norm, act=act) for w in weights]  # type: ignore[misc]


def _row_parallel(x: Tensor, weight: Weight, residual: Tensor) -> Tensor:
    if current_policy().deterministic:
        return segment_sum(x, weight, 8, x.dtype, None, residual)
    return linear(x, weight, residual=residual)


def time_layers() -> None:
    made = {
        (model, rows): {
            name: layer_calls(name, n, k, rows)
            for name, (n, k) in layers.items()
            if name != "head" or rows <= 64
        }
        for model, layers in MODELS.items()
        for rows in (ROWS if model == "0.6B" else ROWS[::3])
    }
    with compiling(16):
        for policy in (PLAIN, FIXED):
            with use_policy(policy):
                for steps in made.values():
                    for calls in steps.values():
                        calls[0]()
    say("compiled; model, rows: us of a layer's products, plain / deterministic; each of them")
    for (model, rows), steps in made.items():
        total, parts = [0.0, 0.0], []
        for name, calls in steps.items():
            us = []
            for policy in (PLAIN, FIXED):
                with use_policy(policy):
                    us.append(graph_us(calls, 1.0, 32 if rows <= 256 else 4))
            parts.append(f"{name} {us[0]:.1f}/{us[1]:.1f}")
            if name != "head":
                total = [total[0] + us[0], total[1] + us[1]]
        sums = f"{total[0]:.1f} / {total[1]:.1f}"
        print(f"{model:5} {rows:5} {sums:>17}  {'  '.join(parts)}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    check_tiles()
    check_sums()
    check_attention()
    time_attention()
    time_layers()


if __name__ == "__main__":
    main()
