"""Latents in 8 bits, in PyTorch and in Triton, against attention over their values in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops import KVFormat, KVLayer, Policy, RmsScale, kv_format, use_policy
from quire.ops.fixed.latent import latent_attention as fixed_attention
from quire.ops.reference import kv8
from quire.ops.reference import latent as reference
from quire.ops.triton.attention import latent as kernels
from quire.ops.triton.attention.latent_attention import LatentTuning, latent_attention
from quire.ops.triton.attention.schedule import Tiles
from tests.ops.test_triton_latent import MIXED, PARTS, SMALL, TOLERANCE, Case

FORMATS = [kv_format(name, torch.float32) for name in ("fp8_e4m3", "fp8_dynamic", "int8")]
formats = pytest.mark.parametrize("stored", FORMATS, ids=["fp8", "fp8_dynamic", "int8"])


class Stored(Case):
    """The same batch over latents in 8 bits, and over their values."""

    def __init__(self, stored: KVFormat, device: str, rows: list[tuple[int, int]], **more: Any):
        super().__init__(device, rows, **more)
        head = torch.tensor([0.021], device=device)
        latents, keys = self.store.split([self.rank, self.store.shape[-1] - self.rank], dim=-1)
        latents, keys = latents.flatten(0, 1), keys.flatten(0, 1).contiguous()
        packed, scales = kv8.quantize(latents.transpose(1, 2), stored, head)
        exact = kv8.dequantize(packed, scales, stored, torch.float64).transpose(1, 2)
        blocks = len(self.store)
        self.exact = torch.cat([exact, keys.double()], -1).unflatten(0, (blocks, 3))[:, 1]
        values = packed.transpose(1, 2).contiguous().view(stored.dtype).unflatten(0, (blocks, 3))
        own = scales.transpose(1, 2).contiguous().unflatten(0, (blocks, 3))
        scale = head if stored.scales == "head" else own[:, 1]
        self.layer = KVLayer(values[:, 1], keys.unflatten(0, (blocks, 3))[:, 1], scale)

    def want(self, kv: KVLayer, dtype: torch.dtype) -> Tensor:
        return reference.latent_attention(
            self.q.to(dtype), kv, self.query_start, self.seq_lens, self.table, rank=self.rank,
            scale=0.2, q_lens=self.q_lens, **self.bounds,
        )[: self.real]  # fmt: skip

    def check(self, **more: Any) -> Tensor:
        want = self.want(KVLayer(self.exact, self.exact), torch.float64)
        found = latent_attention(
            self.q, self.layer, self.query_start, self.seq_lens, self.table, rank=self.rank,
            scale=0.2, **self.bounds, **more,
        )[: self.real]  # fmt: skip
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(found.double(), want, atol=tolerance, rtol=tolerance)
        # The twin also rounds the values of stored numbers.
        twin, tolerance = self.want(self.layer, self.q.dtype), 2 * tolerance
        torch.testing.assert_close(twin.double(), want, atol=tolerance, rtol=tolerance)
        return found


@formats
@pytest.mark.parametrize("tuning", [SMALL, PARTS], ids=["whole", "parts"])
def test_mixed_batch(kernel_device: str, stored: KVFormat, tuning: LatentTuning) -> None:
    Stored(stored, kernel_device, MIXED).check(tuning=tuning)


@formats
def test_16_bits_and_the_sizes_of_published_models(kernel_device: str, stored: KVFormat) -> None:
    case = Stored(
        stored, kernel_device, [(1, 40), (2, 5)], heads=16, rank=512, key=64, dtype=torch.bfloat16
    )
    case.check(tuning=LatentTuning(Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), programs=4))


@formats
def test_deterministic_rows(kernel_device: str, stored: KVFormat) -> None:
    with use_policy(Policy(deterministic=True)):
        Stored(stored, kernel_device, MIXED).check()


@formats
def test_sums_of_fixed_order(stored: KVFormat) -> None:
    case = Stored(stored, "cpu", MIXED)
    found = fixed_attention(
        case.q, case.layer, case.query_start, case.seq_lens, case.table, rank=case.rank,
        scale=0.2, q_lens=case.q_lens, **case.bounds,
    )[: case.real]  # fmt: skip
    torch.testing.assert_close(found, case.want(case.layer, case.q.dtype), atol=1e-5, rtol=1e-5)


@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_and_twin_store_the_same_latents(
    kernel_device: str, stored: KVFormat, dtype: torch.dtype
) -> None:
    """Kernel and twin store the same bytes, scales and keys, except for one step of rounding."""
    tokens, rank, key = 19, 40, 8
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype).to(kernel_device)

    slots = torch.randperm(48, generator=draw)[:tokens].int().to(kernel_device)
    slots[3] = -1
    latent, norm = random(tokens, 7 + rank + key)[:, 7:], RmsScale(random(rank), 1e-6)
    turns: dict[str, Any] = {
        "positions": torch.arange(tokens, device=kernel_device, dtype=torch.int32) % 13,
        "cos_sin": torch.randn(13, key, generator=draw).to(kernel_device),
        "interleaved": True,
    }
    exact = torch.zeros(3, 5, 1, 16, rank + key, dtype=torch.float64, device=kernel_device)
    whole = KVLayer(exact[:, 2], exact[:, 2])
    wide = RmsScale(norm.weight.double(), norm.eps)
    reference.store_latent(latent.double(), whole, norm=wide, slots=slots, **turns)
    found = []
    for function in (reference.store_latent, kernels.store_latent):
        values = torch.zeros(3, 5, 1, 16, rank, dtype=torch.int8, device=kernel_device)
        keys = torch.zeros(3, 5, 1, 16, key, dtype=dtype, device=kernel_device)
        scales = torch.zeros(3, 5, 1, 16, device=kernel_device)
        scale = scales[:, 2]
        if stored.scales == "head":
            scale = torch.full((1,), 0.02, device=kernel_device)
        layer = KVLayer(values.view(stored.dtype)[:, 2], keys[:, 2], scale)
        function(latent, layer, norm=norm, slots=slots, **turns)
        own = scale.expand(3, 1, 16) if stored.scales == "head" else scale
        back = kv8.dequantize(values[:, 2], own, stored, torch.float64)
        written = keys[:, 2].abs().sum(-1) > 0
        assert int(written.sum()) == tokens - 1
        found.append((back[written], keys[:, 2][written].double()))
        # Half a step of the largest number, plus the rounding of 16 bits.
        error = (back - exact[:, 2, ..., :rank])[written].abs()
        top = exact[:, 2, ..., :rank][written].abs().amax(-1, keepdim=True)
        step = 1 / 254 if stored.dtype == torch.uint8 else 1 / 28
        if stored.scales == "head":
            step = 1 / 16
        assert (error <= top * (step + TOLERANCE[dtype])).all()
        assert not values[:, :2].any()
    tolerance = {"atol": 0.02, "rtol": 0.14} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found[0][0], found[1][0], **tolerance)
    torch.testing.assert_close(found[0][1], found[1][1], atol=0.07, rtol=TOLERANCE[dtype])
