"""Attention with its own tiles at the head shapes of real models, against float64."""

from __future__ import annotations

import pytest
import torch

from quire.ops.triton.attention.attention import AttentionTuning
from tests.gpu.test_prefill_attention import Bytes
from tests.ops.test_kv8 import FORMATS
from tests.ops.test_triton_attention import Case

HEADS = ((16, 8, 128), (12, 2, 128), (32, 8, 128), (4, 4, 64), (8, 1, 256))
"""Query heads, KV heads, head size."""
ROWS = {
    "mixed": [(1, 1), (1, 777), (140, 140), (3, 200), (170, 900), (1, 16), (9, 9), (2, 1300)],
    "decode": [(1, 1), (1, 400), (1, 1025), (1, 64), (1, 2000)],
    "few long rows": [(40, 2100), (1, 777), (20, 20), (23, 515), (2, 64), (16, 272)],
}
"""(queries, positions) of each request."""


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kv", [None, *FORMATS])
def test_heads_of_models(kv: str | None, rows: str, heads: tuple[int, int, int]) -> None:
    shape = "cuda", ROWS[rows], *heads, 16, torch.bfloat16
    batch = Bytes(FORMATS[kv], *shape) if kv else Case(*shape)
    for tuning in (AttentionTuning(), AttentionTuning(fixed=True)):
        batch.check(tuning)
