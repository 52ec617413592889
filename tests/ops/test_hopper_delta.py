"""The scan of the gated delta rule on Hopper cards: the parts that a CPU can test."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton.experimental.gluon")

from quire.ops.triton.recurrent.hopper_delta import takes


def test_heads_that_the_kernel_supports() -> None:
    mixed = torch.empty(2, 2 * 128 + 3 * 128, dtype=torch.bfloat16)
    assert takes(mixed, 128, 128)
    assert takes(mixed.half(), 64, 192)
    assert not takes(mixed.float(), 128, 128)
    assert not takes(mixed, 16, 128)
    assert not takes(mixed, 128, 96)
    assert not takes(mixed[:, :-8].contiguous(), 128, 128)
