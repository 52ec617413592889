"""The kernels around the model against their twins, and both against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops import (
    AttentionHeads,
    Drafts,
    Expanded,
    KVFormat,
    LogitRows,
    ResultRing,
    RmsScale,
    StepRows,
    reference,
)
from quire.ops.reference import pool
from quire.ops.reference.step import ENDED, LATE
from quire.ops.rows import HELD
from quire.ops.triton.attention.attention import attention_schedule
from quire.ops.triton.step import decodes, step

PROMPT = 1
SIDES = [pytest.param(reference, id="twin"), pytest.param(step, id="kernel")]


def ints(values: object, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def step_rows(
    lanes: list[int], q_lens: list[int], logits: list[int], flags: list[int], device: str
) -> StepRows:
    starts = [ints([0, *counts], device).cumsum(0).int() for counts in (q_lens, logits)]
    return StepRows(ints(lanes, device), *starts, ints(flags, device))


def logit_rows(count: int, device: str) -> LogitRows:
    """Returns logit rows that hold the values of an earlier step."""
    return LogitRows(*torch.full((4, count), 77, dtype=torch.int32, device=device))


def expanded(
    side: Any, device: str, drafts: Drafts | None
) -> tuple[Expanded, LogitRows, dict[str, Any]]:
    """Returns a step of two prompts' chunks, one of which samples, and two generating rows."""
    make = torch.Generator().manual_seed(0)
    lanes, q_lens, logits = [5, 1, 0, 3, -1], [1, 4, 1500, 7, 0], [1, 4, 0, 1, 0]
    case: dict[str, Any] = {
        "lanes": lanes,
        "q_lens": q_lens,
        "logits": logits,
        "flags": [0, 0, PROMPT, PROMPT, 0],
        "first": {5: 40, 0: 100, 3: 15, 1: 62},
        "block_sizes": (16, 4),
        "tokens": torch.randint(0, 1000, (6, 3000), generator=make).int(),
    }
    case["tables"] = [
        torch.randint(0, 99, (6, 3000 // block_size), generator=make).int()
        for block_size in case["block_sizes"]
    ]
    position = torch.full((6,), -9, dtype=torch.int32)
    for lane, first in case["first"].items():
        position[lane] = first
    found = logit_rows(9, device)
    out = side.expand_rows(
        step_rows(lanes, q_lens, logits, case["flags"], device),
        position.to(device),
        case["tokens"].to(device),
        [
            (t.to(device), block_size)
            for t, block_size in zip(case["tables"], case["block_sizes"], strict=True)
        ],
        found,
        num_tokens=1515,
        max_seq_len=2000,
        drafts=drafts,
    )
    return out, found, case


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("drafted", [False, True])
def test_held_lanes(kernel_device: str, side: Any, drafted: bool) -> None:
    """Rows of a held lane compute nothing. A HELD row has a logit row, whose hidden state is the
    one that the lane keeps; after `finish_rows` it goes on, or is late again."""
    lanes, flags = [1, 0, 2, 3, -1], [HELD, 0, 0, HELD, 0]
    q_lens = [1, 3 if drafted else 1, 1, 1, 0]
    rows = step_rows(lanes, q_lens, q_lens, flags, kernel_device)
    position = ints([-2 - 9, -2 - 5, 12, -1], kernel_device)
    tokens = torch.arange(4 * 40, dtype=torch.int32, device=kernel_device).view(4, 40)
    used = ints([2, 0, 0, 0], kernel_device)
    claims = Drafts(tokens[:, :3].clone(), used.clone(), used) if drafted else None
    table = ints([[*range(10)]] * 4, kernel_device)
    found = logit_rows(8, kernel_device)
    count = sum(q_lens)
    out = side.expand_rows(
        rows, position, tokens, [(table, 4)], found, num_tokens=count, max_seq_len=40, drafts=claims
    )
    real = count - 2
    assert (out.ids >= 0).nonzero().flatten().tolist() == [real]
    assert out.ids[real] == tokens[2, 12]
    assert (out.groups[0].slots >= 0).nonzero().flatten().tolist() == [real]
    start = rows.logit_start.tolist()
    assert found.lanes.tolist()[:count] == [1, *[-1] * q_lens[1], 2, -1]
    assert (found.tokens[0], found.lengths[0], found.ahead[0]) == (-1, 6, 0)
    hidden = torch.randn(count, 6, device=kernel_device)
    held = torch.randn(4, 6, device=kernel_device)
    last, kept = torch.zeros(8, 6, device=kernel_device), torch.zeros(count, 6).to(kernel_device)
    side.collect_rows(hidden, rows, found, position, last, kept, held)
    assert torch.equal(last[0], held[1])
    assert torch.equal(last[start[2]], hidden[real])
    assert torch.equal(kept, hidden)
    assert position.tolist() == [-11, -7, 12, -1]
    for again in (False, True):
        if again:  # A kernel before has found the row late, and its lane held as before.
            found.lanes[0] = -1
            position[1], position[2] = -7, 12
        results = torch.zeros(5, 5, dtype=torch.int32, device=kernel_device)
        zeros = torch.zeros(4, dtype=torch.int32, device=kernel_device)
        side.finish_rows(
            rows, found, ints([70 + i for i in range(count)], kernel_device), results,
            position=position, tokens=tokens, max_total=zeros + 40, min_total=zeros,
            num_stops=zeros, stops=zeros.view(4, 1),
        )  # fmt: skip
        row = [0, LATE, -1, -1, -1] if again else [1, 0, 70, -1, -1]
        assert results[0].tolist() == row
        assert results[1].tolist() == [0, LATE, -1, -1, -1]
        assert results[2].tolist() == [1, 0, 70 + start[2], -1, -1]
        assert results[3].tolist() == [0, 0, -1, -1, -1]
        assert position.tolist() == [-11, -7 if again else 6, 13, -1]


@pytest.mark.parametrize(("window", "even"), [(None, None), (40, None), (None, False), (40, True)])
def test_decodes_are_expanded_like_any_rows(
    kernel_device: str, window: int | None, even: bool | None
) -> None:
    """Lanes: a held one that resumes, one that has ended, a prompt's token without logits, padding
    at the end, and two that generate."""
    make = torch.Generator().manual_seed(4)
    lanes = [3, 5, 0, 2, 1, -1, -1]
    rows = step_rows(
        lanes, [1] * 5 + [0] * 2, [1, 1, 1, 0, 1, 0, 0], [0, HELD, 0, PROMPT, 0, 0, 0], "cpu"
    )
    rows = StepRows(*(part.to(kernel_device) for part in rows))
    position = ints([-1, 1200, 17, 95, 0, -2 - 33], kernel_device)
    tokens = torch.randint(0, 50, (6, 2000), generator=make).int().to(kernel_device)
    tokens[2, 17] = 1 << 30  # An image's token is not in the vocabulary.
    table = torch.randint(0, 99, (6, 500), generator=make).int().to(kernel_device)
    weight = torch.randn(50, 70, generator=make).to(kernel_device)
    heads = AttentionHeads(4, 2, 64, torch.float32, KVFormat(torch.float32), window)
    wanted_logits, found_logits = (logit_rows(1100, kernel_device) for _ in range(2))
    wanted = step.expand_rows(
        rows, position, tokens, [(table, 4)], wanted_logits, num_tokens=7, max_seq_len=2000
    )
    found, embedded, made = decodes.expand_decodes(
        rows, position, tokens, (table, 4), found_logits, weight, max_seq_len=2000,
        attention=heads, even=even,
    )  # fmt: skip
    for name in ("ids", "positions", "seq_lens"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert torch.equal(found.groups[0].slots, wanted.groups[0].slots)
    for row, length in enumerate(found.seq_lens.tolist()):
        used = -(-length // 4)
        tables = (each.groups[0].block_table[row, :used] for each in (found, wanted))
        assert torch.equal(*tables)
    assert torch.equal(embedded, reference.embedding(wanted.ids, weight))
    assert torch.equal(found_logits.lanes, wanted_logits.lanes)
    real = (wanted_logits.lanes >= 0).nonzero().flatten()
    for mine, theirs in zip(found_logits, wanted_logits, strict=True):
        assert torch.equal(mine[real], theirs[real])
    other = attention_schedule(
        rows.query_start, wanted.seq_lens, heads=4, kv_heads=2, head_dim=64, dtype=torch.float32,
        kv_format=heads.kv_format, tokens=7, max_q_len=1, window=window, even=even,
    )  # fmt: skip
    assert made.items.shape == other.items.shape
    used_items = other.items[:, 0] >= 0
    assert torch.equal(made.items[:, 0], other.items[:, 0])
    assert torch.equal(made.items[used_items, :7], other.items[used_items, :7])
    assert torch.equal(made.rows, other.rows)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("used", [None, 3, 1, 0])
def test_expand_rows(kernel_device: str, side: Any, used: int | None) -> None:
    """Row 1 has places for three drafts, and may use fewer."""
    drafts = None
    if used is not None:
        counts = ints([9, used, 9, 9, 9, 9], kernel_device)
        drafts = Drafts(torch.empty(6, 4, device=kernel_device), counts, counts)
    out, found, case = expanded(side, kernel_device, drafts)
    ids, positions = [-1] * 1515, [0] * 1515
    slots = [[-1] * 1515 for _ in case["block_sizes"]]
    wanted_logits: list[tuple[int, ...]] = []
    at = 0
    for lane, length, logits, flags in zip(
        case["lanes"], case["q_lens"], case["logits"], case["flags"], strict=True
    ):
        first = case["first"].get(lane, 0)
        real = length if used is None or length != 4 else 1 + used
        for i in range(real):
            ids[at + i] = int(case["tokens"][lane, first + i])
            positions[at + i] = first + i
            for group, block_size in enumerate(case["block_sizes"]):
                block = int(case["tables"][group][lane, (first + i) // block_size])
                slots[group][at + i] = block * block_size + (first + i) % block_size
        for place in range(logits):
            token = length - logits + place
            wanted_logits.append(
                (
                    lane if token < real else -1,
                    at + token,
                    first + token + 1,
                    0 if flags & PROMPT else place,
                )
            )
        at += length
    assert out.ids.tolist() == ids
    assert out.positions.tolist() == positions
    assert out.seq_lens.tolist() == [41, 66, 1600, 22, 0]
    for group, block_size in enumerate(case["block_sizes"]):
        assert out.groups[group].slots.tolist() == slots[group]
        for row, lane in enumerate(case["lanes"][:4]):
            held = -(-int(out.seq_lens[row]) // block_size)
            table = case["tables"][group][lane, :held]
            assert torch.equal(out.groups[group].block_table[row, :held].cpu(), table)
    got = list(zip(*(part.tolist() for part in found), strict=True))
    assert [line[0] for line in got[6:]] == [-1] * 3
    assert got[:6] == wanted_logits


@pytest.mark.parametrize("side", SIDES)
def test_place_drafts(kernel_device: str, side: Any) -> None:
    device = kernel_device
    cases = [
        # Guessed tokens, their start, the row's first position, its tokens, flags -> used.
        ([20, 21, 22, 23], 5, 4, 4, 0, 3),  # right behind the text, cut by the row
        ([20, 21, 22, 23], 5, 4, 9, 0, 4),  # all that is claimed
        ([20, 21, -1, 23], 5, 4, 9, 0, 2),  # up to the first gap
        ([103, 104, 22, 23], 3, 4, 4, 0, 2),  # the text has come to agree with half of it
        ([103, 9, 22, 23], 3, 4, 4, 0, 0),  # or not
        ([9, 104, 22, 23], 3, 4, 4, 0, 0),
        ([101, 102, 103, 104], 1, 4, 4, 0, 0),  # nothing is left of it
        ([20, 21, 22, 23], 6, 4, 4, 0, 0),  # a claim about what comes later
        ([20, 21, 22, 23], 2**30, 4, 4, 0, 0),  # none at all
        ([20, 21, 22, 23], 5, 4, 1, 0, 77),  # no room: not looked at
        ([20, 21, 22, 23], 5, 4, 4, PROMPT, 77),
        ([-1, -1, -1, -1], 5, 4, 4, 0, 0),
        ([20, 21, 22, 23], 15, 14, 2, 0, 1),  # at the very end of the lane
    ]
    n = len(cases)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1)).tolist()
    rows = step_rows(
        [*order, -1], [cases[i][3] for i in order] + [0], [0] * (n + 1),
        [cases[i][4] for i in order] + [0], device,
    )  # fmt: skip
    tokens = (100 + torch.arange(16)).repeat(n, 1).int()
    drafts = Drafts(
        ints([c[0] for c in cases], device),
        ints([c[1] for c in cases], device),
        ints([77] * n, device),
    )
    got = tokens.to(device)
    side.place_drafts(rows, ints([c[2] for c in cases], device), got, drafts)
    assert drafts.used.tolist() == [c[5] for c in cases]
    for lane, (claim, start, first, *_, used) in enumerate(cases):
        if used != 77:
            taken = claim[first + 1 - start :][:used] if used else []
            tokens[lane, first + 1 : first + 1 + used] = torch.tensor(taken).int()
    assert torch.equal(got.cpu(), tokens)


@pytest.mark.parametrize("side", SIDES)
def test_place_drafts_of_an_odd_number(kernel_device: str, side: Any) -> None:
    drafts = Drafts(
        ints([[1, 2, 3], [7, 8, 9]], kernel_device), ints([5, 4], kernel_device),
        ints([0, 0], kernel_device),
    )  # fmt: skip
    tokens = torch.zeros(2, 16, dtype=torch.int32, device=kernel_device)
    tokens[1, 4] = 7
    rows = step_rows([1, 0], [9, 9], [9, 9], [0, 0], kernel_device)
    side.place_drafts(rows, ints([4, 4], kernel_device), tokens, drafts)
    assert drafts.used.tolist() == [3, 2]
    assert tokens[:, 4:9].tolist() == [[0, 1, 2, 3, 0], [7, 8, 9, 0, 0]]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collect_rows(kernel_device: str, side: Any, dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(2)
    hidden = torch.randn(9, 1100, generator=make).to(dtype).to(kernel_device)
    rows = step_rows([2, 0, 3, -1], [2, 3, 1, 0], [2, 1, 0, 0], [0, PROMPT, PROMPT, 1], "cpu")
    rows = StepRows(*(part.to(kernel_device) for part in rows))
    asked = LogitRows(
        *(ints(x, kernel_device) for x in ([2, -1, 0, -1], [0, 1, 4, 99], *[[0] * 4] * 2))
    )
    position = ints([10, 20, 30, 40], kernel_device)
    kept, last = (torch.zeros(12, 1100, dtype=dtype, device=kernel_device) for _ in range(2))
    side.collect_rows(hidden, rows, asked, position, last, kept)
    assert torch.equal(kept[:9], hidden)
    assert not kept[9:].any()
    assert torch.equal(last[[0, 2]], hidden[[0, 4]])
    assert position.tolist() == [13, 20, 30, 41]


@pytest.mark.parametrize("side", SIDES)
def test_collect_rows_with_a_norm_and_a_ring(kernel_device: str, side: Any) -> None:
    """The norm is applied to the step's hidden states, not to those of held lanes."""
    make = torch.Generator().manual_seed(3)
    hidden, held = (torch.randn(n, 70, generator=make).to(kernel_device) for n in (3, 4))
    norm = RmsScale(torch.randn(70, generator=make).to(kernel_device), 1e-5)
    rows = step_rows([2, 0, 3], [1, 1, 1], [1, 1, 1], [0, HELD, 0], kernel_device)
    asked = LogitRows(*(ints(x, kernel_device) for x in ([2, 0, 3], [0, -1, 2], *[[0] * 3] * 2)))
    position = ints([10, 20, 30, 40], kernel_device)
    kept, last = (torch.zeros(3, 70, device=kernel_device) for _ in range(2))
    ring = ResultRing(torch.zeros(3, 4, 3).int(), ints([2], kernel_device))
    side.collect_rows(hidden, rows, asked, position, last, kept, held, ring, norm)
    wanted = reference.rms_norm(hidden, *norm)
    torch.testing.assert_close(kept, wanted)
    torch.testing.assert_close(last[[0, 2]], wanted[[0, 2]])
    assert torch.equal(last[1], held[0])
    assert ring.turn.tolist() == [0]


@pytest.mark.parametrize("side", SIDES)
def test_results_are_written_to_the_ring(kernel_device: str, side: Any) -> None:
    out = finish(side, kernel_device, [{"lane": 1, "first": 4, "sampled": [8]}], width=3)
    assert out["ring"][1, 0].tolist() == out["results"][0].tolist()
    assert not out["ring"][0].any()


STOPS = [[5, 6, 9], [5, 5, 5], [5, 5, 5], [5, 6, 7], [5, 6, 9], [0, 0, 0]]
"""Stop tokens. The lanes have 2, 1, 0, 3, 2, 0 of them; the other entries are ignored."""


def finish(
    side: Any, device: str, runs: list[dict[str, Any]], max_len: int = 24, width: int = 6
) -> dict[str, Any]:
    """Runs `finish_rows` on rows that keywords describe.

    The keywords are lane, first (the position of its first logit row's token), drafts, sampled, and
    used (logit rows that exist)."""
    tokens = torch.zeros(6, max_len, dtype=torch.int32)
    lanes, lengths, sampled = [], [], []
    position = torch.full((6,), -9, dtype=torch.int32)
    for run in runs:
        lane, first, samples = run["lane"], run["first"], run["sampled"]
        held = run.get("used", len(samples))
        for i, token in enumerate(samples):
            lanes.append(lane if i < held else -1)
            lengths.append(first + i)
            sampled.append(token)
        drafts = run.get("drafts", [])
        tokens[lane, first : first + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        position[lane] = run.get("position", first - 1)
    counts = [len(run["sampled"]) for run in runs]
    rows = step_rows([r["lane"] for r in runs] + [-1], [1] * len(runs) + [0], [*counts, 0],
                     [0] * (len(runs) + 1), device)  # fmt: skip
    places = [[*x, -1, -1] for x in (lanes, [0] * len(lanes), lengths, [0] * len(lanes))]
    out = {
        "position": position.to(device),
        "tokens": tokens.to(device),
        "counts": torch.zeros(6, 40, dtype=torch.int32, device=device),
        "results": torch.full((8, width), 99, dtype=torch.int32, device=device),
        "ring": torch.zeros(2, 8, width, dtype=torch.int32, pin_memory=device == "cuda"),
    }
    side.finish_rows(
        rows,
        LogitRows(*(ints(x, device) for x in places)),
        ints([*sampled, 31, 31], device),
        out["results"],
        position=out["position"],
        tokens=out["tokens"],
        max_total=ints([24, 24, 24, 12, 24, 24], device),
        min_total=ints([0, 0, 0, 0, 12, 0], device),
        num_stops=ints([2, 1, 0, 3, 2, 0], device),
        stops=ints(STOPS, device),
        counts=out["counts"],
        ring=ResultRing(out["ring"], ints([1], device)),
    )
    return out


# A row, and what it gives: tokens, reason.
FINISHED: dict[str, tuple[dict[str, Any], list[int], int]] = {
    "one": ({"lane": 0, "first": 8, "sampled": [9]}, [9], 0),
    "stop": ({"lane": 0, "first": 8, "sampled": [6]}, [6], 1),
    "no stops": ({"lane": 2, "first": 8, "sampled": [5]}, [5], 0),
    "stops of another request behind": ({"lane": 1, "first": 8, "sampled": [6]}, [6], 0),
    "too early": ({"lane": 4, "first": 11, "sampled": [5]}, [5], 0),
    "not too early": ({"lane": 4, "first": 12, "sampled": [5]}, [5], 1),
    "length": ({"lane": 3, "first": 11, "sampled": [9]}, [9], 2),
    "stop at the length": ({"lane": 3, "first": 11, "sampled": [7]}, [7], 1),
    "broken": ({"lane": 0, "first": 8, "sampled": [-1]}, [], 3),
    "a broken prompt": ({"lane": 0, "first": 8, "sampled": [-1], "position": 8}, [], 3),
    "right": (
        {"lane": 5, "first": 8, "drafts": [1, 2, 3], "sampled": [1, 2, 3, 4]},
        [1, 2, 3, 4],
        0,
    ),
    "wrong": ({"lane": 5, "first": 8, "drafts": [1, 2, 3], "sampled": [9, 2, 3, 4]}, [9], 0),
    "partly": ({"lane": 5, "first": 8, "drafts": [1, 2, 3], "sampled": [1, 9, 3, 4]}, [1, 9], 0),
    "fewer used": (
        {"lane": 5, "first": 8, "drafts": [1], "sampled": [1, 0, 0, 0], "used": 2}, [1, 0], 0,
    ),
    "stop within": (
        {"lane": 0, "first": 8, "drafts": [1, 5, 3], "sampled": [1, 5, 3, 4]}, [1, 5], 1,
    ),
    "stop within, too early": (
        {"lane": 4, "first": 10, "drafts": [5, 5, 6], "sampled": [5, 5, 6, 4]}, [5, 5, 6], 1,
    ),
    "length within": (
        {"lane": 3, "first": 10, "drafts": [1, 2, 3], "sampled": [1, 2, 3, 4]}, [1, 2], 2,
    ),
    "broken within": (
        {"lane": 5, "first": 8, "drafts": [1, 2, 3], "sampled": [1, -1, 3, 4]}, [1], 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", FINISHED)
def test_finish_rows(kernel_device: str, side: Any, name: str) -> None:
    run, given, reason = FINISHED[name]
    out = finish(side, kernel_device, [run])
    lane, first = run["lane"], run["first"]
    assert out["results"][0].tolist() == [len(given), reason, *given, *[-1] * (4 - len(given))]
    moved = first - 1 + len(given) if given else run.get("position", first - 1)
    # A row that was launched before its lane's end was known is padding.
    assert out["position"][lane] == (ENDED if reason in (1, 2) else moved)
    assert out["tokens"][lane, first : first + len(given)].tolist() == given
    counts = torch.zeros(40, dtype=torch.int32)
    counts.index_add_(0, torch.tensor(given).long(), torch.full((len(given),), 2).int())
    assert torch.equal(out["counts"][lane].cpu(), counts)
    others = [i for i in range(6) if i != lane]
    assert not out["counts"][others].any()
    assert (out["position"][others] == -9).all()


@pytest.mark.parametrize("side", SIDES)
def test_rows_finish_side_by_side(kernel_device: str, side: Any) -> None:
    """Rows finish as they do alone, and rows without logits or lanes give no results."""
    names = ["partly", "length within", "one", "stop within, too early"]
    runs = [FINISHED[name][0] for name in names]
    out = finish(side, kernel_device, [*runs, {"lane": 1, "first": 8, "sampled": []}])
    for row, name in enumerate(names):
        _, given, reason = FINISHED[name]
        line = [len(given), reason, *given, *[-1] * (4 - len(given))]
        assert out["results"][row].tolist() == line
    assert out["results"][4].tolist() == [0, 0, -1, -1, -1, -1]
    assert out["position"][1] == 7


@pytest.mark.parametrize("side", SIDES)
def test_lanes_that_ended_are_padding(kernel_device: str, side: Any) -> None:
    """A row that was launched before its lane's end was known is padding."""
    names = "one", "stop", "length", "broken"
    for run, given, reason in (FINISHED[name] for name in names):
        out = finish(side, kernel_device, [run], width=3)
        moved = run["first"] - 1 + len(given)
        assert out["position"][run["lane"]] == (ENDED if reason in (1, 2) else moved)
    rows = step_rows([2, 0, 1], [1, 1, 3], [1, 1, 0], [0, 0, PROMPT], kernel_device)
    found = logit_rows(4, kernel_device)
    tokens = torch.arange(60, dtype=torch.int32).view(3, 20).to(kernel_device)
    table = torch.arange(15, dtype=torch.int32).view(3, 5).to(kernel_device)
    out = side.expand_rows(
        rows, ints([7, 4, -1], kernel_device), tokens, [(table, 4)], found, num_tokens=6,
        max_seq_len=20,
    )  # fmt: skip
    assert out.ids.tolist() == [-1, 7, 24, 25, 26, -1]
    assert out.positions.tolist() == [0, 7, 4, 5, 6, 0]
    assert out.groups[0].slots.tolist() == [-1, 7, 24, 25, 26, -1]
    assert found.lanes.tolist()[:2] == [-1, 0]


def test_finish_without_counts_or_sampled_tokens(kernel_device: str) -> None:
    """A head with only prompts' chunks gives no tokens."""
    for side in (reference, step):
        rows = step_rows([1, 0], [3, 4], [0, 0], [PROMPT] * 2, kernel_device)
        results = torch.full((4, 3), 99, dtype=torch.int32, device=kernel_device)
        position = ints([7, 8], kernel_device)
        columns = {
            name: ints([9, 9], kernel_device) for name in ("max_total", "min_total", "num_stops")
        }
        side.finish_rows(  # type: ignore[attr-defined]
            rows, logit_rows(4, kernel_device), ints([], kernel_device), results,
            position=position, tokens=torch.zeros(2, 9, dtype=torch.int32, device=kernel_device),
            stops=torch.zeros(2, 3, dtype=torch.int32, device=kernel_device), **columns,
        )  # fmt: skip
        assert results[:2].tolist() == [[0, 0, -1]] * 2
        assert position.tolist() == [7, 8]


@pytest.mark.parametrize("side", [pool, step])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool_rows(kernel_device: str, side: Any, dtype: torch.dtype) -> None:
    """Sums in one step and over two, means of several lengths, last states, and rows without
    pooling."""
    device, width = kernel_device, 300
    make = torch.Generator().manual_seed(4)
    hidden = torch.randn(16, width, generator=make).to(dtype).to(device)
    rows = step_rows([4, 2, 0, 3, 1, -1], [3, 5, 1, 2, 4, 0], [0] * 6, [PROMPT] * 6, device)
    sums = torch.randn(5, width, generator=make).to(device)
    before = sums.double()
    out = torch.zeros(6, width, device=device)
    shares = ints([1 | 2 | 4, 1 | 4, 4, 1 | 2, 0, 7], device)
    lengths = ints([3, 11, 0, 0, 0, 0], device)
    side.pool_rows(hidden, rows, shares, sums, lengths, out)
    exact = hidden.double()
    expected = before.clone()
    expected[4], expected[3] = exact[:3].sum(0), exact[9:11].sum(0)
    expected[2] += exact[3:8].sum(0)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)
    vectors = torch.stack([expected[4] / 3, expected[2] / 11, exact[8]])
    torch.testing.assert_close(out[:3].double(), vectors, rtol=1e-5, atol=1e-5)
    assert not out[3:].any()


@pytest.mark.parametrize("side", SIDES)
def test_scatter_writes_words_where_they_belong(kernel_device: str, side: Any) -> None:
    counts = [1, 3000, 2, 0, 17]
    starts = [0, 5000, 1, 4000, 8000]
    make = torch.Generator().manual_seed(5)
    values = torch.randint(-(2**31), 2**31, (sum(counts) + 4,), generator=make).int()
    want = torch.zeros(9000, dtype=torch.int32)
    lines, place = [], 0
    for start, count in zip(starts, counts, strict=True):
        lines += [start, count, place]
        want[start : start + count] = values[place : place + count]
        place += count
    packed = torch.cat([torch.tensor(lines).int(), values]).to(kernel_device)
    memory = torch.zeros(9000, dtype=torch.int32, device=kernel_device)
    side.scatter(memory, packed, len(counts), max(counts))
    assert torch.equal(memory.cpu(), want)
