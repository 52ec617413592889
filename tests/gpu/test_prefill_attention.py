"""Prefill attention by wgmma and TMA against a float64 twin, on cards that have them."""

from __future__ import annotations

import math

import pytest
import torch

from quire.ops.triton import launch
from quire.ops.triton.attention.attention import AttentionTuning, paged_attention
from tests.ops.test_kv8 import FORMATS, Stored
from tests.ops.test_sinks import sinks_of
from tests.ops.test_triton_attention import Case

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and launch.traits(torch.device("cuda", 0)).gluon),
    reason="needs a Hopper card and a Triton whose Gluon the kernels take",
)
ROWS = [(1, 1), (1, 777), (140, 140), (3, 200), (170, 900), (301, 301), (9, 9), (40, 2100)]
"""(queries, positions): whole prompts, the rest after a cached prefix, and decodes."""
HOPPER = AttentionTuning(spread=0)
CASES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "one query head each": ({"heads": 2, "kv_heads": 2}, {}),
    "groups of six": ({"heads": 12}, {}),
    "groups of eight, heads of 64": ({"kv_heads": 1, "dim": 64}, {}),
    "float16": ({"dtype": torch.float16}, {}),
    "blocks of 8": ({"block_size": 8}, {}),
    "blocks larger than a tile": ({"block_size": 256}, {}),
    "window": ({}, {"window": 100}),
    "soft-cap": ({}, {"softcap": 2.0}),
    "sinks": ({}, {"sinks": True}),
    "all three, heads of 64": ({"dim": 64}, {"window": 300, "softcap": 2.0, "sinks": True}),
    "fp8": ({"kv": "fp8"}, {}),
    "fp8, heads of 64, window": ({"kv": "fp8", "dim": 64}, {"window": 100}),
    "fp8_dynamic, groups of six": ({"kv": "fp8_dynamic", "heads": 12}, {}),
    "fp8_dynamic, blocks of 8, all three": (
        {"kv": "fp8_dynamic", "block_size": 8}, {"window": 300, "softcap": 2.0, "sinks": True},
    ),
    "int8": ({"kv": "int8"}, {}),
    "int8, float16, heads of 64, blocks larger than a tile": (
        {"kv": "int8", "dtype": torch.float16, "dim": 64, "block_size": 256}, {},
    ),
}  # fmt: skip


class Bytes(Stored):
    """A batch over a cache in 8 bits. The test does not use the reference, which computes in the
    queries' dtype."""

    # KV is rounded to fp16 as well.
    allowed = 1e-2

    def check_reference(self, want: torch.Tensor, **keywords: object) -> None:
        pass


def case(
    heads: int = 8, kv_heads: int = 2, dim: int = 128, dtype: torch.dtype = torch.bfloat16,
    block_size: int = 16, kv: str | None = None,
) -> Case:  # fmt: skip
    shape = "cuda", ROWS, heads, kv_heads, dim, block_size, dtype
    return Bytes(FORMATS[kv], *shape, padding=(5, 2)) if kv else Case(*shape, padding=(5, 2))


def keywords(batch: Case, extra: dict[str, object]) -> dict[str, object]:
    return extra | {"sinks": sinks_of(batch)} if "sinks" in extra else extra


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compiles all at once: one takes ten seconds."""
    with launch.compiling(len(CASES)):
        for shape, extra in CASES.values():
            batch = case(**shape)  # type: ignore[arg-type]
            batch.run(HOPPER, **keywords(batch, extra))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_twin(name: str) -> None:
    shape, extra = CASES[name]
    batch = case(**shape)  # type: ignore[arg-type]
    batch.check(HOPPER, **keywords(batch, extra))


def test_slots_behind_the_stored_tokens_may_hold_anything() -> None:
    batch = case(heads=12)
    for row, total in enumerate(batch.seq_lens.tolist()[: batch.rows]):
        if total % 16:
            block = int(batch.table[row, total // 16])
            batch.kv.k[block, :, total % 16 :] = float("nan")
            batch.kv.v[block, :, total % 16 :] = float("nan")
    batch.check(HOPPER)


@pytest.mark.parametrize("programs", [0, 1, 3])
def test_programs_share_the_tiles(programs: int) -> None:
    from quire.ops.triton.attention import hopper

    batch = case(heads=12)
    out = torch.empty_like(batch.q)
    rows = batch.query_start, batch.seq_lens, batch.table
    hopper.attend_long_rows(
        batch.q, batch.kv, None, out, rows, (0.3 * math.log2(math.e), 0.0), softcap=False,
        window=None, shortest=3, pdl=True, tiles=hopper.RingTiles(128, 2, programs),
    )  # fmt: skip
    want = batch.check(HOPPER)
    # The first two rows have a token each, and another kernel.
    torch.testing.assert_close(out[2 : batch.real], want[2:], rtol=0, atol=0)


@pytest.mark.parametrize("kv", FORMATS)
def test_bits_of_a_row_are_its_own_in_8_bits(kv: str) -> None:
    """Compares a row's last query alone, which has other tiles, with all rows together."""
    batch, fixed = case(kv=kv), AttentionTuning(fixed=True)
    together = batch.check(fixed)
    row = 4
    end = int(batch.query_start[row + 1])
    alone = paged_attention(
        batch.q[end - 1 : end], batch.kv, torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
        batch.seq_lens[row : row + 1], batch.table[row : row + 1],
        max_q_len=1, max_seq_len=batch.max_seq, scale=0.3, tuning=fixed,
    )  # fmt: skip
    assert torch.equal(alone, together[end - 1 : end])
