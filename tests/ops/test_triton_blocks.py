"""Copies of scattered pieces against plain indexing."""

from __future__ import annotations

import pytest
import torch

from quire.ops.triton.step.blocks import copy_pieces


@pytest.mark.parametrize(("size", "count"), [(16, 5), (48, 1), (40000, 7)])
def test_pieces_arrive_where_they_belong(kernel_device: str, size: int, count: int) -> None:
    make = torch.Generator().manual_seed(size)
    pool = torch.randint(0, 256, (20, size), generator=make).byte().to(kernel_device)
    out = torch.zeros(12, size, dtype=torch.uint8, device=kernel_device)
    src = torch.randperm(20, generator=make)[:count]
    dst = torch.randperm(12, generator=make)[:count]
    addresses = torch.stack([pool.data_ptr() + src * size, out.data_ptr() + dst * size])
    copy_pieces(addresses.to(kernel_device), size, programs=3)
    want = torch.zeros_like(out)
    want[dst] = pool[src]
    assert torch.equal(out, want)
