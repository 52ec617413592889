"""Attention over latents in Triton against its twins in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops import KVLayer, Policy, RmsScale, use_policy
from quire.ops.reference import latent as reference
from quire.ops.triton.attention import latent as kernels
from quire.ops.triton.attention.latent_attention import (
    LatentTuning,
    head_block,
    latent_attention,
    latent_most_skew,
    latent_schedule,
)
from quire.ops.triton.attention.schedule import Tiles

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
SMALL = LatentTuning(short=Tiles(16, 16, 4, 1), long=Tiles(16, 16, 4, 1), programs=8, spread=0)
PARTS = LatentTuning(short=Tiles(16, 16, 4, 1), long=Tiles(16, 16, 4, 1), programs=8, spread=64)
MIXED = [(1, 1), (1, 50), (11, 30), (3, 20), (1, 16), (2, 40)]


class Case:
    """A mixed batch over a cache that is strided like the engine's (all layers in a block)."""

    def __init__(
        self, device: str, rows: list[tuple[int, int]], heads: int = 6, rank: int = 40,
        key: int = 8, dtype: torch.dtype = torch.float32, padding: int = 3,
    ) -> None:  # fmt: skip
        draw = torch.Generator().manual_seed(len(rows) + heads)
        lengths = [q for q, _ in rows] + [0]
        self.rank, self.real, tokens = rank, sum(lengths), sum(lengths) + padding
        self.query_start = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        self.seq_lens = torch.tensor([s for _, s in rows] + [0]).int().to(device)
        most = -(-max(s for _, s in rows) // 16) + 1
        blocks = most * len(rows) + 3
        ids = torch.randperm(blocks, generator=draw)[: most * len(rows)].reshape(-1, most)
        for row, (_, total) in enumerate(rows):
            ids[row, -(-total // 16) :] = -1
        self.table = torch.cat([ids, torch.full((1, most), -1)]).int().to(device)
        store = torch.randn(blocks, 3, 1, 16, rank + key, generator=draw).to(dtype)
        used = torch.zeros(blocks, dtype=torch.bool)
        used[ids[ids >= 0]] = True
        # No kernel reads blocks that no row owns.
        self.wrong = store.clone()
        self.wrong[~used] = float("nan")
        self.store, self.wrong = store.to(device), self.wrong.to(device)
        self.q = torch.randn(tokens, heads, rank + key, generator=draw).to(dtype).to(device)
        self.q_lens = tuple(lengths)
        self.bounds = {"max_q_len": max(lengths), "max_seq_len": max(s for _, s in rows)}

    def run(self, **more: Any) -> Tensor:
        latents = self.wrong[:, 1]
        return latent_attention(
            self.q, KVLayer(latents, latents), self.query_start, self.seq_lens, self.table,
            rank=self.rank, scale=0.2, **self.bounds, **more,
        )[: self.real]  # fmt: skip

    def check(self, **more: Any) -> Tensor:
        latents = self.store[:, 1].double()
        want = reference.latent_attention(
            self.q.double(), KVLayer(latents, latents), self.query_start, self.seq_lens, self.table,
            rank=self.rank, scale=0.2, q_lens=self.q_lens, **self.bounds,
        )[: self.real]  # fmt: skip
        found, tolerance = self.run(**more), TOLERANCE[self.q.dtype]
        torch.testing.assert_close(found.double(), want, atol=tolerance, rtol=tolerance)
        return found


@pytest.mark.parametrize("tuning", [SMALL, PARTS], ids=["whole", "parts"])
def test_mixed_batch(kernel_device: str, tuning: LatentTuning) -> None:
    Case(kernel_device, MIXED).check(tuning=tuning)


def test_blocks_of_heads(kernel_device: str) -> None:
    assert [head_block(heads) for heads in (1, 6, 16, 20, 64, 80, 128)] == [
        1,
        6,
        16,
        20,
        64,
        40,
        64,
    ]
    tuning = LatentTuning(short=Tiles(64, 16, 4, 1), long=Tiles(64, 16, 4, 1), programs=6)
    Case(kernel_device, [(1, 17), (2, 5)], heads=128, rank=16, key=4).check(tuning=tuning)


def test_the_sizes_of_published_models(kernel_device: str) -> None:
    Case(kernel_device, [(1, 40), (2, 5)], heads=16, rank=512, key=64).check()


def test_bf16_and_a_schedule_that_serves_all_layers(kernel_device: str) -> None:
    case = Case(kernel_device, [(1, 70), (1, 5)], heads=4, dtype=torch.bfloat16, padding=0)
    made = latent_schedule(
        case.query_start, case.seq_lens, heads=4, rank=40, width=48, dtype=torch.bfloat16,
        tokens=len(case.q), max_q_len=1,
    )  # fmt: skip
    case.check(scratch={"schedule": made})


@pytest.mark.parametrize("even", [None, True, False])
def test_decodes_that_fill_the_card(kernel_device: str, even: bool | None) -> None:
    """Row 3 is long, row 5 has ended."""
    rows = [(1, 20)] * 14
    rows[3], rows[5] = (1, 120), (0, 0)
    case = Case(kernel_device, rows, padding=0)
    made = latent_schedule(
        case.query_start, case.seq_lens, heads=6, rank=40, width=48, dtype=case.q.dtype,
        tokens=len(case.q), max_q_len=1, even=even,
    )  # fmt: skip
    if kernel_device == "cpu":
        assert made.parts is (even is False)
        assert (int(made.rows[1, 3]) > 1) is made.parts
        assert latent_most_skew(case.seq_lens, 6) == len(case.seq_lens) / 4
        assert latent_most_skew(case.seq_lens[:12], 6) is None
    case.check(scratch={"schedule": made})


def test_deterministic_rows_do_not_depend_on_the_batch(kernel_device: str) -> None:
    with use_policy(Policy(deterministic=True)):
        whole = Case(kernel_device, MIXED).check()
        case = Case(kernel_device, MIXED)
        case.query_start = torch.tensor([0, 1, 2], dtype=torch.int32, device=kernel_device)
        case.seq_lens, case.table, case.real = case.seq_lens[:2], case.table[:2], 2
        case.bounds["max_q_len"] = 1
        assert torch.equal(case.run(), whole[:2])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_norms_before_and_after_the_product(
    kernel_device: str, dtype: torch.dtype, interleaved: bool
) -> None:
    """Queries, values and stored latents, of sizes that fill no tile."""
    tokens, heads, dim, rank, key, size = 19, 3, 12, 40, 8, 20
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype).to(kernel_device)

    q, both = random(tokens, heads, dim + key), random(heads, dim + size, rank)
    keys, values = both.split([dim, size], dim=1)
    turns: dict[str, Any] = {
        "positions": torch.arange(tokens, device=kernel_device, dtype=torch.int32) % 13,
        "cos_sin": torch.randn(13, key, generator=draw).to(kernel_device),
        "interleaved": interleaved,
    }
    tolerance = {"atol": TOLERANCE[dtype] * 4, "rtol": TOLERANCE[dtype]}
    want = reference.latent_queries(q.double(), keys.double(), **turns)
    torch.testing.assert_close(kernels.latent_queries(q, keys, **turns).double(), want, **tolerance)
    mean = random(tokens, heads, rank)
    want = reference.latent_values(mean.double(), values.double())
    torch.testing.assert_close(kernels.latent_values(mean, values).double(), want, **tolerance)

    slots = torch.randperm(48, generator=draw)[:tokens].int().to(kernel_device)
    slots[3] = -1
    latent = random(tokens, 7 + rank + key)[:, 7:]
    norm = RmsScale(random(rank), 1e-6)
    stores = torch.zeros(2, 3, 5, 1, 16, rank + key, dtype=dtype, device=kernel_device)
    for store, function in zip(stores, (reference.store_latent, kernels.store_latent), strict=True):
        layer = KVLayer(store[:, 2], store[:, 2])
        function(latent, layer, norm=norm, slots=slots, **turns)
    torch.testing.assert_close(stores[1], stores[0], **tolerance)
    assert int((stores[1] != 0).any(-1).sum()) == tokens - 1
