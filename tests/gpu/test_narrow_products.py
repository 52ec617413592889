"""Products of 17 to 32 rows with 16-bit weights by wgmma, against float64."""

from __future__ import annotations

import pytest
import torch

from quire.ops.triton.launch import traits
from quire.ops.triton.products.plan import LinearArgs
from quire.ops.weight import Weight

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_programs_of_a_tile_give_the_product(dtype: torch.dtype) -> None:
    if not traits(DEVICE).gluon:
        pytest.skip("needs a Hopper card and the Triton that its kernels are written for")
    from quire.ops.triton.products.hopper_narrow import product, takes

    torch.manual_seed(0)
    wrong = []
    for rows, outputs, inputs, bias in (
        (32, 520, 1024, False), (17, 264, 1000, True), (25, 4096, 4096, False), (30, 8, 256, True),
    ):  # fmt: skip
        x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)
        weight = torch.randn(outputs, inputs, device=DEVICE, dtype=dtype) * 0.03
        added = torch.randn(rows, outputs, device=DEVICE, dtype=dtype)
        own = torch.randn(outputs, device=DEVICE, dtype=dtype) if bias else None
        args = LinearArgs(x, Weight.plain(weight), own, residual=added)
        assert takes(args)
        y = x.double() @ weight.double().T + added.double()
        y = y if own is None else y + own.double()
        for _ in range(2):  # the first leaves the counters as it found them
            error = float((product(args).double() - y).norm() / y.norm())
            if not error < (5e-3 if dtype == torch.bfloat16 else 1e-3):
                wrong.append((rows, outputs, inputs, error))
    assert not wrong
