"""Attention over latents at the shapes of DeepSeek-V3: checks the kernels against twins in float64,
then times them in graphs.

    python bench/kernels/latent.py

The table has µs per layer on one rank of 8, and on one alone: of attention, with the share of the
memory bandwidth that reading the latents once takes, or of the card's products; and of the products
with the projection from latents before and behind it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(ROOT / "bench" / "kernels"))

from timing import DEVICE, copies_beyond_l2, graph_us  # noqa: E402

from quire.ops import KVLayer  # noqa: E402
from quire.ops.reference import latent as reference  # noqa: E402
from quire.ops.triton.attention import latent as products  # noqa: E402
from quire.ops.triton.attention.latent_attention import latent_attention, latent_schedule  # noqa: E402

RANK, KEY, DIM = 512, 64, 128
BLOCK = 16
BANDWIDTH = 4.8e12
"""Bytes a second of an H200."""
FLOPS = 9.9e14
"""Products of bf16 a second of an H200."""
Rows = list[tuple[int, int]]


class Batch:
    """Rows of (queries, context) over caches of several layers."""

    def __init__(self, rows: Rows, heads: int, dtype: torch.dtype, layers: int = 1) -> None:
        widths = [-(-total // BLOCK) for _, total in rows]
        order = torch.randperm(sum(widths)).int().split(widths)
        table = torch.full((len(rows), max(widths)), -1, dtype=torch.int32)
        for row, own in enumerate(order):
            table[row, : len(own)] = own
        starts = torch.tensor([0, *(q for q, _ in rows)]).cumsum(0).int()
        shape = layers, sum(widths), 1, BLOCK, RANK + KEY
        self.store = torch.randn(shape, device=DEVICE, dtype=dtype)
        tokens = sum(q for q, _ in rows)
        self.q = torch.randn(tokens, heads, RANK + KEY, device=DEVICE, dtype=dtype)
        self.starts, self.table = starts.to(DEVICE), table.to(DEVICE)
        self.lens = torch.tensor([s for _, s in rows], dtype=torch.int32, device=DEVICE)
        self.most = max(q for q, _ in rows)
        self.keywords: dict[str, Any] = {
            "rank": RANK, "scale": 0.1, "q_lens": tuple(q for q, _ in rows),
            "max_q_len": self.most, "max_seq_len": max(s for _, s in rows),
        }  # fmt: skip

    def run(self, layer: int = 0, schedule: Any = None) -> torch.Tensor:
        kv = KVLayer(self.store[layer], self.store[layer])
        scratch = {} if schedule is None else {"schedule": schedule}
        return latent_attention(
            self.q, kv, self.starts, self.lens, self.table, scratch=scratch, **self.keywords
        )

    def twin(self) -> torch.Tensor:
        wide = self.store[0].double()
        return reference.latent_attention(
            self.q.double(), KVLayer(wide, wide), self.starts, self.lens, self.table,
            **self.keywords,
        )  # fmt: skip

    def schedule(self) -> Any:
        return latent_schedule(
            self.starts, self.lens, heads=self.q.shape[1], rank=RANK, width=RANK + KEY,
            dtype=self.q.dtype, tokens=len(self.q), max_q_len=self.most,
        )  # fmt: skip


def check() -> int:
    """Returns how many cases are wrong."""
    wrong = 0
    dtype, heads = (torch.bfloat16, (16, 20, 128)) if DEVICE == "cuda" else (torch.float32, (4,))
    long = 700 if DEVICE == "cuda" else 40
    for count in heads:
        for rows in ([(1, long), (1, 3)], [(5, 30), (1, long), (40, 40)], [(long, 2 * long)]):
            batch = Batch(rows if DEVICE == "cuda" else rows[:2], count, dtype)
            want = batch.twin()
            error = float((batch.run().double() - want).norm() / want.norm())
            good = error < (1e-2 if DEVICE == "cuda" else 1e-5)
            wrong += not good
            print(f"{count:4} heads, {rows}: error {error:.1e}{'' if good else '  WRONG'}")
            if DEVICE != "cuda":
                return wrong
    return wrong


def times(rows: Rows, heads: int) -> tuple[float, float, float, str]:
    """Returns µs of attention, of queries and of values; and what attention's are of its floor."""
    seen = sum(total for _, total in rows)
    layers = copies_beyond_l2(seen * (RANK + KEY) * 2, 16)
    batch = Batch(rows, heads, torch.bfloat16, layers)
    made = batch.schedule()
    attention = graph_us([lambda layer=layer: batch.run(layer, made) for layer in range(layers)])  # type: ignore[misc]
    weights = torch.randn(layers, heads, 2 * DIM, RANK, device=DEVICE, dtype=torch.bfloat16)
    tokens = len(batch.q)
    q = torch.randn(tokens, heads, DIM + KEY, device=DEVICE, dtype=torch.bfloat16)
    turns: dict[str, Any] = {
        "positions": torch.zeros(tokens, dtype=torch.int32, device=DEVICE),
        "cos_sin": torch.randn(8, KEY, device=DEVICE),
        "interleaved": True,
    }
    before = graph_us(
        [lambda own=own: products.latent_queries(q, own[:, :DIM], **turns) for own in weights]  # type: ignore[misc]
    )
    means = batch.run()
    behind = graph_us(
        [lambda own=own: products.latent_values(means, own[:, DIM:]) for own in weights]  # type: ignore[misc]
    )
    pairs = sum(q * (total - q) + q * (q + 1) // 2 for q, total in rows)
    by_bytes = seen * (RANK + KEY) * 2 / BANDWIDTH * 1e6
    by_products = 2 * pairs * heads * (2 * RANK + KEY) / FLOPS * 1e6
    if by_bytes > by_products:
        return attention, before, behind, f"{100 * by_bytes / attention:.0f} % of the bandwidth"
    return attention, before, behind, f"{100 * by_products / attention:.0f} % of the products"


def main() -> int:
    wrong = check()
    if DEVICE != "cuda":
        return wrong
    print(f"\n{'heads, rows':28}{'attention':>11}{'queries':>9}{'values':>9}   µs per layer")
    for heads in (16, 128):
        for name, rows in (
            ("1 decode of 4096", [(1, 4096)]),
            ("64 decodes of 2048", [(1, 2048)] * 64),
            ("prompt of 2048", [(2048, 2048)]),
        ):
            *found, share = times(rows, heads)
            line = f"{heads:4}, {name:22}" + "".join(f"{each:10.1f}" for each in found)
            print(f"{line}   {share}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
