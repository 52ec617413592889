"""The kernels between a draft model's passes against their twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.ops import Drafts
from quire.ops.reference import drafts as twin
from quire.ops.reference.step import held_position
from quire.ops.triton.step import drafts as kernel

LANES, WIDTH, MAX_LEN = 5, 8, 40


def ints(values: object, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def case(seed: int, device: str) -> dict[str, Tensor]:
    """Returns rows in descending order of their drafts; in some the model's position is behind the
    text's."""
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draw, dtype=torch.int32).to(device)

    rows = seed % (LANES + 1)
    lanes = torch.randperm(LANES, generator=draw).int().to(device)
    lanes[rows:] = -1
    counts = number(0, 4, LANES).sort(descending=True).values
    counts[rows:] = 0
    firsts = number(1, 5, LANES)
    firsts[rows:] = 0
    query_start = torch.cat([ints([0], device), firsts.cumsum(0).int()])
    position = number(6, 30, LANES)
    return {
        "rows": lanes,
        "counts": counts,
        "query_start": query_start,
        "position": position,
        "own": position - number(-3, 6, LANES),
        "used": torch.full_like(position, 7),
        "ids": number(0, 50, LANES, WIDTH),
        "start": number(0, 30, LANES),
        "tokens": number(0, 50, LANES, MAX_LEN),
        "drawn": number(-1, 50, 4, LANES),
    }


def run(side: object, seed: int, device: str, *, held: bool = False) -> dict[str, Tensor]:
    c = case(seed, device)
    if held:
        c["position"] = held_position(c["position"])
    claims = Drafts(c["ids"], c["start"], torch.zeros_like(c["start"]))
    fill = torch.full((LANES,), 9, dtype=torch.int32, device=device)
    passes = twin.PassRows(
        fill.clone(), ints([9] * (LANES + 1), device), torch.zeros_like(fill), fill.clone(),
        ints([4], device),
    )  # fmt: skip
    side.begin_drafts(  # type: ignore[attr-defined]
        c["rows"], c["counts"], c["query_start"], c["position"], c["own"], c["used"], claims, passes
    )
    found = {f"begin.{name}": value.clone() for name, value in passes._asdict().items()}
    found["begin.used"], found["begin.own"] = c["used"].clone(), c["own"].clone()
    for number in range(4):
        # Later passes have places for fewer rows.
        drawn = c["drawn"][number, : max(1, LANES - number)]
        side.keep_drafts(  # type: ignore[attr-defined]
            drawn, c["counts"], c["position"], c["own"], c["tokens"], claims, passes
        )
        found |= {
            f"{number}.{name}": value.clone()
            for name, value in {**c, **passes._asdict(), "ids": claims.ids}.items()
        }
    return found


@pytest.mark.parametrize("seed", range(12))
def test_kernels_and_twins_agree(kernel_device: str, seed: int) -> None:
    expected = run(twin, seed, kernel_device)
    for name, value in run(kernel, seed, kernel_device).items():
        if name.endswith("lengths"):
            # Values of rows without a lane are undefined.
            lanes = expected[name.replace("lengths", "lanes")]
            assert torch.equal(value[lanes >= 0], expected[name][lanes >= 0]), name
        else:
            assert torch.equal(value, expected[name]), name


def test_a_pass_advances_by_the_tokens_it_computed() -> None:
    """One row is at its text's end and drafts two tokens; the other is two tokens behind."""
    lanes, counts = ints([1, 0], "cpu"), ints([2, 1], "cpu")
    position, own = ints([10, 20], "cpu"), ints([8, 23], "cpu")
    tokens = torch.zeros(2, 30, dtype=torch.int32)
    claims = Drafts(
        torch.full((2, 4), 5, dtype=torch.int32), ints([0, 0], "cpu"), ints([0, 0], "cpu")
    )
    used = ints([0, 0], "cpu")
    passes = twin.PassRows(*(torch.zeros(n, dtype=torch.int32) for n in (2, 3, 2, 2, 1)))
    twin.begin_drafts(lanes, counts, ints([0, 2, 4], "cpu"), position, own, used, claims, passes)
    # Lane 1 was ahead of the text, so it computes its last known token again.
    assert own.tolist() == [8, 20]
    assert used.tolist() == [1, 0]
    assert passes.places.tolist() == [0, 3]
    assert passes.lengths.tolist() == [21, 10]
    assert claims.start.tolist() == [11, 21]
    twin.keep_drafts(ints([7, 8], "cpu"), counts, position, own, tokens, claims, passes)
    assert tokens[1, 21] == 7
    assert claims.ids.tolist() == [[-1] * 4, [7, -1, -1, -1]]
    assert not tokens[0].any()
    assert passes.lanes.tolist() == [1, -1]
    assert passes.query_start.tolist() == [0, 1, 1]
    twin.keep_drafts(ints([9], "cpu"), counts, position, own, tokens, claims, passes)
    assert claims.ids[1].tolist() == [7, 9, -1, -1]
    assert passes.lanes.tolist() == [-1, -1]
    assert own.tolist() == [10, 22]


@pytest.mark.parametrize("side", [twin, kernel])
@pytest.mark.parametrize("seed", range(3))
def test_lanes_that_are_held_draft_as_before(kernel_device: str, side: object, seed: int) -> None:
    """The text is the same, and the model's own position stays within it."""
    expected = run(side, seed, kernel_device)
    for name, value in run(side, seed, kernel_device, held=True).items():
        if not name.endswith("position"):
            assert torch.equal(value, expected[name]), name
