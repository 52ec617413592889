"""Paged attention in Triton against a float64 twin, on rows of every kind at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.ops import AttentionHeads, KVFormat, KVLayer, Policy, use_policy
from quire.ops.triton import launch
from quire.ops.triton.attention.attention import (
    AttentionTuning,
    Tiles,
    _more_programs,
    attention_schedule,
    most_skew,
    paged_attention,
)
from quire.ops.triton.attention.schedule import Cuts, schedule, schedule_long
from quire.ops.triton.launch import INTERPRETED
from tests.slow import slow

SMALL = AttentionTuning(decode=Tiles(16, 16, 2, 2), prefill=Tiles(32, 16, 4, 2), programs=16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def twin(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: list[int],
    seq_lens: list[int],
    table: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention row by row in float64; gathers positions one by one through the block
    table."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    block_size, group = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    for row, total in enumerate(seq_lens):
        start, end = query_start[row], query_start[row + 1]
        position = torch.arange(total, device=q.device)
        blocks = table[row].long()[position // block_size]
        k = k_cache[blocks, :, position % block_size].double().repeat_interleave(group, 1)
        v = v_cache[blocks, :, position % block_size].double().repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", q[start:end].double(), k) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        at = torch.arange(total - (end - start), total, device=q.device)[:, None]
        seen = position[None] <= at
        if window is not None:
            seen &= position[None] > at - window
        logits = logits.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            own = sinks.double()[:, None, None].expand(-1, end - start, 1)
            logits = torch.cat((logits, own), -1)
        weights = logits.softmax(-1)[..., : len(position)]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


class Case:
    """A mixed batch over a cache that is strided like the engine's (all layers in a block)."""

    def __init__(
        self,
        device: str,
        rows: list[tuple[int, int]],
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        padding: tuple[int, int] = (0, 0),
    ) -> None:
        make = torch.Generator().manual_seed(len(rows) + dim)
        lengths = [q for q, _ in rows] + [0] * padding[1]
        tokens = sum(lengths) + padding[0]
        self.query_start = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
        self.seq_lens = torch.tensor([s for _, s in rows] + [0] * padding[1]).int().to(device)
        most = -(-max(s for _, s in rows) // block_size) + 1
        blocks = most * len(rows) + 3
        ids = torch.randperm(blocks, generator=make)[: most * len(rows)].reshape(-1, most)
        for row, (_, total) in enumerate(rows):
            ids[row, -(-total // block_size) :] = -1
        fill = torch.full((padding[1], most), -1)
        self.table = torch.cat([ids, fill]).int().to(device)
        store = torch.randn(blocks, 3, 2, kv_heads, block_size, dim, generator=make)
        used = torch.zeros(blocks, dtype=torch.bool)
        used[ids[ids >= 0]] = True
        store[~used] = float("nan")
        store = store.to(dtype).to(device)
        self.kv = KVLayer(store[:, 1, 0], store[:, 1, 1])
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=make)
        self.q = qkv.to(dtype).to(device)[:, :heads]
        self.real = sum(lengths)
        self.max_q, self.max_seq = max(lengths), max(s for _, s in rows)
        self.rows = len(rows)

    def run(self, tuning: AttentionTuning = SMALL, **keywords: object) -> Tensor:
        return paged_attention(
            self.q, self.kv, self.query_start, self.seq_lens, self.table,
            max_q_len=self.max_q, max_seq_len=self.max_seq, scale=0.3, tuning=tuning,
            **keywords,  # type: ignore[arg-type]
        )[: self.real]  # fmt: skip

    def check(self, tuning: AttentionTuning = SMALL, **keywords: object) -> Tensor:
        out = self.run(tuning, **keywords)
        keywords.pop("scratch", None)
        starts, lens = self.query_start.tolist(), self.seq_lens.tolist()[: self.rows]
        want = twin(
            self.q, self.kv.k, self.kv.v, starts, lens, self.table, 0.3,
            **keywords,  # type: ignore[arg-type]
        )[: self.real]  # fmt: skip
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
        return out


MIXED = [(1, 1), (1, 77), (40, 40), (3, 20), (17, 90), (1, 16), (9, 9), (2, 130)]


@pytest.mark.parametrize(("heads", "kv_heads"), [slow(4, 4), (4, 2), (6, 1), slow(16, 8)])
def test_mixed_batch(kernel_device: str, heads: int, kv_heads: int) -> None:
    Case(kernel_device, MIXED, heads, kv_heads).check()


@pytest.mark.parametrize("dim", [slow(64), 80, slow(96), 128, 256])
def test_head_sizes(kernel_device: str, dim: int) -> None:
    Case(kernel_device, [(1, 33), (20, 45)], 2, 1, dim).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(kernel_device: str, dtype: torch.dtype) -> None:
    Case(kernel_device, [(1, 70), (20, 45)], dtype=dtype).check()


@pytest.mark.parametrize("block_size", [1, slow(4), 32])
def test_block_sizes(kernel_device: str, block_size: int) -> None:
    Case(kernel_device, [(1, 70), (20, 45)], block_size=block_size).check()


@pytest.mark.parametrize("window", [1, slow(5), 16, slow(33), slow(1000)])
def test_sliding_window(kernel_device: str, window: int) -> None:
    Case(kernel_device, MIXED).check(window=window)
    Case(kernel_device, MIXED).check(replace(SMALL, programs=1), window=window)


def test_blocks_before_the_window_may_be_gone(kernel_device: str) -> None:
    case = Case(kernel_device, MIXED)
    window, block_size = 20, case.kv.k.shape[2]
    want = case.check(window=window)
    for row, (length, total) in enumerate(MIXED):
        gone = max(total - length - window + 1, 0) // block_size
        case.table[row, :gone] = -1
    assert torch.equal(case.run(window=window), want)


@pytest.mark.parametrize("rows", [50, 64, 80, 132])
def test_one_long_row_among_many_is_cut(kernel_device: str, rows: int) -> None:
    """The other rows are not split, because they fill the card without it."""
    card, kv_heads = replace(INTERPRETED, num_sms=132), 8
    programs = _more_programs(rows * kv_heads, KVFormat(torch.bfloat16), card)
    for long, least in ((1000, 1), (8192, 4)):
        lengths = [1000] * (rows - 1) + [long]
        query_start = torch.arange(rows + 1).int().to(kernel_device)
        cuts = Cuts(1, Tiles(16, 64, 4, 3), programs // kv_heads, 1, 32, None)
        seq_lens = torch.tensor(lengths).int().to(kernel_device)
        made = schedule(query_start, seq_lens, cuts, pdl=False)
        *others, last = made.rows[1].tolist()
        assert set(others) == {1}
        assert last == 1 if long == 1000 else last >= least


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (40, True)])
@pytest.mark.parametrize("even", [None, True, False])
def test_decodes_that_fill_the_card(
    kernel_device: str, even: bool | None, window: int | None, sinks: bool
) -> None:
    """Row 3 is long, row 5 has ended."""
    rows = [(1, 20)] * 14
    rows[3], rows[5] = (1, 200), (0, 0)
    case, tuning = Case(kernel_device, rows), replace(AttentionTuning(), decode=SMALL.decode)
    made = attention_schedule(
        case.query_start, case.seq_lens, heads=4, kv_heads=2, head_dim=64, dtype=case.q.dtype,
        kv_format=case.kv.format, tokens=len(case.q), max_q_len=1, window=window, even=even,
        tuning=tuning,
    )  # fmt: skip
    if kernel_device == "cpu":
        assert made.parts is not even
        assert window is not None or (int(made.rows[1, 3]) > 1) is made.parts
        assert int(made.rows[1].sum() - made.rows[1, 3]) == 12
    own = torch.linspace(-1, 1, 4, device=kernel_device) if sinks else None
    case.check(tuning, window=window, sinks=own, scratch={"schedule": made})


def test_the_skew_up_to_which_rows_stay_whole(kernel_device: str) -> None:
    heads = AttentionHeads(8, 2, 64, torch.bfloat16, KVFormat(torch.bfloat16))
    sms = launch.traits(torch.device(kernel_device)).num_sms

    def skew(programs: int) -> float | None:
        return most_skew(torch.zeros(programs // 2, device=kernel_device), heads)

    assert skew(3 * sms) is None
    assert skew(4 * sms) == 1.25
    assert skew(20 * sms) == 4.0
    with use_policy(Policy(deterministic=True)):
        assert skew(4 * sms) is None


def test_soft_cap(kernel_device: str) -> None:
    Case(kernel_device, MIXED).check(softcap=2.0)


@pytest.mark.parametrize("programs", [0, 2, 6, 80])
@pytest.mark.parametrize("min_tiles", [slow(1), 2])
def test_decode_in_parts(kernel_device: str, programs: int, min_tiles: int) -> None:
    rows = [(1, 1), (1, 300), (1, 16), (1, 129)]
    tuning = replace(SMALL, programs=programs, min_tiles=min_tiles)
    Case(kernel_device, rows).check(tuning)
    Case(kernel_device, rows).check(replace(tuning, most_parts=3))


def test_a_schedule_serves_all_layers(kernel_device: str) -> None:
    case = Case(kernel_device, MIXED)
    made = attention_schedule(
        case.query_start, case.seq_lens, heads=4, kv_heads=2, head_dim=64, dtype=case.q.dtype,
        kv_format=case.kv.format, tokens=len(case.q), max_q_len=case.max_q, tuning=SMALL,
    )  # fmt: skip
    assert made is not None
    want = case.check()
    for _ in range(2):
        assert torch.equal(case.run(scratch={"schedule": made}), want)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("programs", [0, slow(2), 7, slow(64), 1000])
def test_schedule_covers_each_short_row_once(
    kernel_device: str, programs: int, window: int | None
) -> None:
    rows = [(1, 77), (0, 0), (40, 40), (1, 1), (2, 300), (1, 16), (0, 0), *[(1, 50)] * 300]
    query_start = torch.tensor([0, *(q for q, _ in rows)]).cumsum(0).int().to(kernel_device)
    seq_lens = torch.tensor([n for _, n in rows]).int().to(kernel_device)
    cuts = Cuts(8, Tiles(16, 16, 2, 2), programs // 2, 1, 4, window)
    made = schedule(query_start, seq_lens, cuts, pdl=False)
    items = made.items.tolist()
    used = [item for item in items if item[0] >= 0]
    assert [item[0] for item in items[len(used) :]] == [-1] * (len(items) - len(used))
    lengths = [-(-(end - start) // 16) for _, start, end, *_ in used]
    for row, (q_len, seq_len) in enumerate(rows):
        mine = [(i, item) for i, item in enumerate(used) if item[0] == row]
        if not 0 < q_len <= 8:
            assert mine == []
            continue
        first = seq_len - q_len
        begin = 0 if window is None else max(first - window + 1, 0) // 16 * 16
        leader, parts = made.rows[:, row].tolist()
        assert [i for i, _ in mine] == list(range(leader, leader + parts))
        assert parts <= 4
        for _, (_, start, end, *rest, _) in mine:
            assert start == begin
            assert rest == [int(query_start[row]), q_len, first, parts]
            begin = end
        assert begin == seq_len
    leaders = [made.rows[0, item[0]].item() for item in used]
    longest = [max(lengths[at : at + item[6]]) for at, item in zip(leaders, used, strict=True)]
    assert longest == sorted(longest, reverse=True)


BEHIND = [(20, 300), (1, 77), (33, 50), (16, 160), (17, 17), (2, 130), (1, 1)]
"""Long rows behind prefixes and without, one of whole tiles, among short ones."""
SPREAD = replace(SMALL, spread=100)


@pytest.mark.parametrize(
    ("window", "spread"),
    [
        *((None, 400), (1, 24), (20, 2), (140, 24)),
        *(
            slow(None, 2),
            slow(None, 24),
            slow(20, 400),
            slow(1, 2),
            slow(1, 400),
            slow(20, 24),
            slow(140, 2),
            slow(140, 400),
        ),
    ],
)
def test_long_rows_in_parts(kernel_device: str, spread: int, window: int | None) -> None:
    tuning = replace(SMALL, spread=spread)
    Case(kernel_device, BEHIND, padding=(5, 3)).check(tuning, window=window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 1, 80), slow(3, 3, 16), slow(8, 1, 256)]
)
def test_long_rows_in_parts_of_other_shapes(
    kernel_device: str, heads: int, kv_heads: int, dim: int
) -> None:
    rows = [(20, 200), (1, 30), (11, 64)]
    Case(kernel_device, rows, heads, kv_heads, dim, padding=(2, 1)).check(SPREAD)
    Case(kernel_device, rows, heads, kv_heads, dim).check(replace(SPREAD, most_parts=3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_long_rows_in_parts_of_half_precision(kernel_device: str, dtype: torch.dtype) -> None:
    case = Case(kernel_device, [(20, 140), (1, 30)], dtype=dtype)
    case.check(SPREAD)
    case.check(replace(SPREAD, upcast=True), softcap=2.0)


def test_long_rows_in_parts_read_nothing_unwritten(kernel_device: str) -> None:
    """New tensors are filled with NaN or the largest integers."""
    case = Case(kernel_device, BEHIND, 2, 1, 16, padding=(5, 3))
    want = case.check(SPREAD, window=20)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(case.run(SPREAD, window=20), want)
    finally:
        torch.use_deterministic_algorithms(False)


def test_long_rows_in_one_part_are_as_without(kernel_device: str) -> None:
    case = Case(kernel_device, BEHIND, 3, 1, padding=(5, 3))
    assert torch.equal(case.run(replace(SMALL, spread=1)), case.run(replace(SMALL, spread=0)))


def long_schedule(case: Case, kv_heads: int, tuning: AttentionTuning) -> object:
    made = attention_schedule(
        case.query_start, case.seq_lens, heads=case.q.shape[1], kv_heads=kv_heads,
        head_dim=case.q.shape[2], dtype=case.q.dtype, kv_format=case.kv.format, tokens=len(case.q),
        max_q_len=case.max_q, tuning=tuning,
    )  # fmt: skip
    return made.long


def test_few_long_rows_are_spread_by_default(kernel_device: str) -> None:
    case = Case(kernel_device, [(20, 300), (1, 90)], 4, 1)
    assert long_schedule(case, 1, AttentionTuning()) is not None
    case.check(AttentionTuning())
    for tuning in (AttentionTuning(spread=0), AttentionTuning(most_parts=1)):
        assert long_schedule(case, 1, tuning) is None
    decode = Case(kernel_device, [(1, 300), (2, 90)], 4, 1)
    assert long_schedule(decode, 1, AttentionTuning()) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="how much fills the card differs")
def test_many_long_rows_are_not_spread(kernel_device: str) -> None:
    case = Case(kernel_device, [(60, 60), (70, 90)], 4, 1)
    assert long_schedule(case, 1, AttentionTuning()) is None


@pytest.mark.parametrize(
    ("programs", "window", "decodes"),
    [(1, None, 2), (40, 20, 2), (1000, None, 2), slow(60, None, 300)],
)
def test_schedule_covers_each_long_tile_once(
    kernel_device: str, programs: int, window: int | None, decodes: int
) -> None:
    short = [(1, 50)] * decodes
    rows = [(9, 77), (0, 0), (40, 400), (1, 1), (8, 300), (16, 16), *short, (11, 3000)]
    lengths = [q for q, _ in rows]
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    tokens, group = starts[-1] + 7, 6
    made = schedule_long(
        torch.tensor(starts, dtype=torch.int32, device=kernel_device),
        torch.tensor([n for _, n in rows], dtype=torch.int32, device=kernel_device),
        tokens=tokens, group=group, kv_heads=2, programs=programs, shortest=9,
        tiles=Tiles(32, 16, 2, 2), most_parts=20, window=window, pdl=False,
    )  # fmt: skip
    items = made.items.tolist()
    used = [item for item in items if item[0] >= 0]
    assert [item[0] for item in items[len(used) :]] == [-1] * (len(items) - len(used))
    whole = sum(item[6] == 1 for item in used)
    assert len(used) - whole <= programs // 2
    assert [item[2] for item in used] == sorted((item[2] for item in used), reverse=True)
    places = made.places.tolist()
    for row, (q_len, seq_len) in enumerate(rows):
        mine = [(i, item) for i, item in enumerate(used) if item[0] == row]
        here = range(starts[row], starts[row + 1])
        if q_len < 9:
            assert mine == []
            assert all(places[1][token] == 0 for token in here)
            continue
        leader, (_, _, per, *rest, parts, _) = mine[0]
        assert rest == [starts[row], q_len, seq_len - q_len]
        assert parts <= 20
        assert parts == 1 or per >= 2
        for token in here:
            assert [place[token] for place in places] == [leader, parts, starts[row]]
        count = -(-q_len * group // 32)
        want = [[row, p, per, *rest, parts, tile] for tile in range(count) for p in range(parts)]
        assert mine == list(enumerate(want, leader))
        for tile in range(count):
            first = seq_len - q_len + tile * 32 // group
            last = seq_len - q_len + min((tile * 32 + 31) // group, q_len - 1)
            begin = 0 if window is None else max(first - window + 1, 0) // 16
            assert last // 16 + 1 - begin <= parts * per
    assert places[1][starts[-1] :] == [0] * 7


def test_drafts_are_short_rows(kernel_device: str) -> None:
    Case(kernel_device, [(4, 60), (4, 5), (1, 90)], 6, 1).check(
        replace(SMALL, decode=Tiles(32, 16, 2, 2))
    )


def test_padding_rows_and_tokens_are_skipped(kernel_device: str) -> None:
    Case(kernel_device, MIXED, padding=(5, 3)).check()
    Case(kernel_device, [(1, 9), (1, 40)], padding=(6, 6)).check()


def test_default_tuning(kernel_device: str) -> None:
    Case(kernel_device, MIXED, 8, 2, 128).check(AttentionTuning())


@pytest.mark.slow
def test_more_rows_than_one_lookup_holds(kernel_device: str) -> None:
    Case(kernel_device, [(1, 2)] * 256 + [(40, 50)], 1, 1, 16).check(replace(SMALL, programs=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
def test_upcast_fallback(kernel_device: str, dtype: torch.dtype) -> None:
    Case(kernel_device, MIXED, dtype=dtype).check(replace(SMALL, upcast=True, pdl=False))


def test_fixed_path_ignores_the_rest_of_the_batch(kernel_device: str) -> None:
    """Bitwise the same alone, with other rows, and in chunks: the same KV tiles in the same
    order."""
    fixed = replace(SMALL, fixed=True)
    case = Case(kernel_device, MIXED)
    together = case.check(fixed)
    for row in (1, 4):
        start, end = case.query_start[row].item(), case.query_start[row + 1].item()
        for first in (start, end - 1):
            alone = paged_attention(
                case.q[first:end], case.kv,
                torch.tensor([0, end - first], dtype=torch.int32, device=kernel_device),
                case.seq_lens[row : row + 1], case.table[row : row + 1],
                max_q_len=end - first, max_seq_len=case.max_seq, scale=0.3, tuning=fixed,
            )  # fmt: skip
            assert torch.equal(alone, together[first:end])
