"""Attention with sinks: the twin and the kernels, for short and long rows, whole and in parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.ops import reference
from tests.ops.test_kv8 import Stored, formats
from tests.ops.test_triton_attention import BEHIND, MIXED, SMALL, SPREAD, Case


def sinks_of(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    drawn = 2 * torch.randn(case.q.shape[1], generator=generator)
    return drawn.to(case.q.dtype).to(case.q.device)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (20, None), (None, 2.0)])
def test_mixed_batch(kernel_device: str, window: int | None, softcap: float | None) -> None:
    case = Case(kernel_device, MIXED, 6, 2)
    sinks = sinks_of(case)
    found = case.check(window=window, softcap=softcap, sinks=sinks)
    twin = reference.paged_attention(
        case.q, replace_unwritten(case), case.query_start, case.seq_lens, case.table,
        q_lens=tuple(case.query_start.diff().tolist()), max_q_len=case.max_q,
        max_seq_len=case.max_seq, scale=0.3, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    torch.testing.assert_close(twin[: case.real], found, atol=1e-5, rtol=1e-5)


def replace_unwritten(case: Case) -> object:
    """Makes unwritten values finite, because the twin may read them."""
    return replace(case.kv, k=case.kv.k.nan_to_num(0.0), v=case.kv.v.nan_to_num(0.0))


def test_parts_count_a_sink_once(kernel_device: str) -> None:
    case = Case(kernel_device, [(1, 130), (1, 9), (1, 64)])
    case.check(replace(SMALL, programs=24, min_tiles=1), sinks=sinks_of(case))
    case = Case(kernel_device, BEHIND, 3, 1)
    case.check(SPREAD, sinks=sinks_of(case))
    case.check(SPREAD, window=20, sinks=sinks_of(case))


def test_one_order_for_all_batches(kernel_device: str) -> None:
    case = Case(kernel_device, MIXED, dtype=torch.float16)
    case.check(replace(SMALL, fixed=True), sinks=sinks_of(case))


@formats
def test_keys_and_values_in_8_bits(kernel_device: str, kv_format: object) -> None:
    case = Stored(kv_format, kernel_device, [(1, 70), (20, 45)])  # type: ignore[arg-type]
    case.check(sinks=sinks_of(case))
