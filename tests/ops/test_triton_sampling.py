"""Sampling kernels against their twins, noise included."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.ops import LogitRows, ProcessedLogits, StepRows, reference
from quire.ops.reference import random, truncate
from quire.ops.triton.step import step
from quire.ops.triton.step.sampling import sample, token_logprobs
from quire.runner.hooks.logprobs import WIDTH
from quire.sampling_params import MAX_LOGPROBS
from tests.slow import slow

VOCAB = 5003

# temperature, top_k, top_p, min_p
ROWS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.3, 50, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (1.0, 20, 0.5, 0.1),
    (1.0, 0, 0.01, 0.0),
    (0.8, 4000, 0.7, 0.0),
    (1.0, VOCAB, 1.0, 0.0),
    (1.0, 9999999, 0.95, 0.001),
]


SAMPLERS = [
    pytest.param(reference.sample, id="twin"),
    pytest.param(functools.partial(sample, cap=128), id="kernel"),
]


class Lanes:
    """Parameters in tables of more lanes than rows, as the runner keeps them."""

    def __init__(self, rows: list[tuple[float, int, float, float]], device: str) -> None:
        n = len(rows)
        make = torch.Generator().manual_seed(1)
        self.lanes = (torch.randperm(n + 4, generator=make)[:n]).to(device)
        self.floats = torch.zeros(n + 4, 6, device=device)
        self.ints = torch.randint(-(2**31), 2**31, (n + 4, 4), generator=make).int().to(device)
        self.floats[self.lanes, :3] = torch.tensor([(r[0], r[2], r[3]) for r in rows]).to(device)
        self.ints[self.lanes, 0] = torch.tensor([r[1] for r in rows]).int().to(device)
        self.ints[:, 3] = self.ints[:, 3] & 127
        self.position = torch.arange(n, dtype=torch.int32, device=device) * 97 + 3
        self.op: Any = sample

    def run(self, logits: Tensor, lanes: Tensor | None = None, **keywords: int | bool) -> Tensor:
        return self.op(
            logits, self.lanes if lanes is None else lanes, self.position,
            temperature=self.floats[:, 0], top_p=self.floats[:, 1], min_p=self.floats[:, 2],
            top_k=self.ints[:, 0], seed=self.ints[:, 1:3], sample_index=self.ints[:, 3],
            **keywords,  # type: ignore[arg-type]
        )  # fmt: skip

    def scores(self, logits: Tensor) -> Tensor:
        """Returns the scores whose maximum the twin takes, float32 [N, V]."""
        floats, ints = self.floats[self.lanes], self.ints[self.lanes]
        greedy = floats[:, 0:1] == 0
        x = logits.float() / torch.where(greedy, 1.0, floats[:, 0:1])
        cut = truncate.min_p(x, floats[:, 2])
        cut = truncate.top_k_top_p(cut, ints[:, 0], floats[:, 1])
        noise = random.gumbel(ints[:, 1:3], ints[:, 3], self.position, logits.shape[1])
        return torch.where(greedy, x, cut + noise)


@pytest.mark.parametrize("side", [reference, step], ids=["twin", "kernel"])
def test_sample_and_finish_is_both_in_one(kernel_device: str, side: Any) -> None:
    """The last row's logits are not numbers, and the row before it has no logit row."""
    lanes = Lanes(ROWS[:3] * 2, kernel_device)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(5)).to(kernel_device)
    logits[5, 7] = torch.nan
    ids, start = lanes.lanes.int(), torch.arange(7).int().to(kernel_device)
    rows = StepRows(ids, start, start, torch.zeros_like(ids))
    places = LogitRows(ids.clone(), start[:6], lanes.position, torch.zeros_like(ids))
    places.lanes[4] = -1
    zeros = torch.zeros(10, dtype=torch.int32, device=kernel_device)
    sampling = {
        "temperature": lanes.floats[:, 0], "top_p": lanes.floats[:, 1], "min_p": lanes.floats[:, 2],
        "top_k": lanes.ints[:, 0], "seed": lanes.ints[:, 1:3], "sample_index": lanes.ints[:, 3],
    }  # fmt: skip

    def columns() -> dict[str, Tensor]:
        return {
            "position": zeros.clone(), "tokens": zeros.repeat(600, 1).T.contiguous(),
            "max_total": zeros + 600, "min_total": zeros, "num_stops": zeros,
            "stops": zeros.view(10, 1),
        }  # fmt: skip

    one, two = (torch.zeros(6, 3, dtype=torch.int32, device=kernel_device) for _ in range(2))
    side.sample_and_finish(logits, rows, places, one, sampling=sampling, **columns())
    drawn = sample(logits, places.lanes, places.lengths, **sampling, truncate_rows=False)
    step.finish_rows(rows, places, drawn, two, **columns())
    assert torch.equal(one, two)
    assert one[:, 0].tolist() == [1, 1, 1, 1, 0, 0]


def check(tokens: Tensor, scores: Tensor) -> None:
    """Each token's score is the best one, up to the rounding of two different logarithms."""
    own = scores.gather(1, tokens.long()[:, None])[:, 0]
    best = scores.amax(1)
    assert ((own == best) | (best - own <= 2e-5 * (1 + best.abs()))).all(), (best - own).tolist()


@pytest.mark.parametrize(
    ("spread", "dtype"),
    [
        *((0.05, torch.float32), (3.0, torch.bfloat16)),
        *(slow(0.05, torch.bfloat16), slow(3.0, torch.float32)),
    ],
)
def test_sample(kernel_device: str, dtype: torch.dtype, spread: float) -> None:
    """With a spread near zero, rows are too flat to collect candidates, so the other path runs."""
    make = torch.Generator().manual_seed(2)
    logits = (spread * torch.randn(len(ROWS), VOCAB, generator=make)).to(dtype).to(kernel_device)
    case = Lanes(ROWS, kernel_device)
    check(case.run(logits, cap=256), case.scores(logits))
    case.op = reference.sample
    check(case.run(logits), case.scores(logits))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_nucleus_ends_where_its_mass_is_reached(kernel_device: str, sampler: Any) -> None:
    """Two tokens of 0.5 each: one alone reaches 0.5, whatever the noise prefers."""
    rows = [(1.0, 0, top_p, 0.0) for top_p in (*[0.5] * 16, *[0.75] * 16)]
    make = torch.Generator().manual_seed(7)
    # The others have no probability in float32, but are not too flat to collect.
    logits = torch.randn(len(rows), VOCAB, generator=make).to(kernel_device) - 60.0
    logits[:, [3, 1000]] = 0.0
    case = Lanes(rows, kernel_device)
    case.op = sampler
    tokens = case.run(logits).tolist()
    assert set(tokens[:16]) == {3}
    assert set(tokens[16:]) == {3, 1000}


def test_sample_without_truncation(kernel_device: str) -> None:
    rows = ROWS[:3]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3)).to(kernel_device)
    case = Lanes(rows, kernel_device)
    check(case.run(logits, truncate_rows=False), case.scores(logits))
    case.op = reference.sample
    check(case.run(logits, truncate_rows=False), case.scores(logits))


def test_masked_entries_and_padding(kernel_device: str) -> None:
    case = Lanes(ROWS, kernel_device)
    logits = torch.full((len(ROWS), VOCAB), -math.inf, device=kernel_device)
    allowed = torch.arange(len(ROWS), device=kernel_device) * 311 + 7
    logits[torch.arange(len(ROWS)), allowed] = -50.0
    lanes = case.lanes.clone()
    lanes[2] = -1
    tokens = case.run(logits, lanes, cap=128)
    real = lanes >= 0
    assert torch.equal(tokens[real].long(), allowed[real])


def test_rows_do_not_depend_on_each_other(kernel_device: str) -> None:
    logits = torch.randn(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(4))
    logits = logits.to(kernel_device)
    case = Lanes(ROWS, kernel_device)
    together = case.run(logits, cap=128)
    case.position, case.lanes = case.position[3:7], case.lanes[3:7]
    assert torch.equal(case.run(logits[3:7], cap=128), together[3:7])


@pytest.mark.parametrize("op", SAMPLERS)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("place", [0, VOCAB - 1])
def test_rows_with_nan_give_no_token(kernel_device: str, op: Any, cut: bool, place: int) -> None:
    """This holds for every sampler. Infinities are valid, and other rows are not affected."""
    rows = [ROWS[0], ROWS[1], ROWS[6]] if cut else ROWS[:3]
    logits = torch.randn(2 * len(rows), VOCAB, generator=torch.Generator().manual_seed(5))
    logits = logits.to(kernel_device)
    case = Lanes([*rows, *rows], kernel_device)
    case.op = op
    clean = case.run(logits, truncate_rows=cut)
    logits[: len(rows), place] = math.nan
    logits[0, :] = math.nan
    found = case.run(logits, truncate_rows=cut)
    assert (found[: len(rows)] == -1).all()
    assert torch.equal(found[len(rows) :], clean[len(rows) :])
    assert (clean >= 0).all()


def logprobs(
    op: Any, logits: Tensor, tokens: list[int], wanted: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Buffers for the positions, ranks, ids and values that an op writes, one lane per row."""
    count, device = len(logits), logits.device
    lanes = torch.arange(count, dtype=torch.int32).flip(0)
    lanes[[i for i, amount in enumerate(wanted) if amount == -2]] = -1
    amounts = torch.tensor([max(-1, amount) for amount in wanted], dtype=torch.int32).flip(0)
    lengths = torch.arange(count, dtype=torch.int32, device=device) * 7 + 1
    rows = LogitRows(lanes.to(device), lengths, lengths, torch.zeros_like(lengths))
    out = torch.full((count + 2, WIDTH), 99, dtype=torch.int32, device=device)
    own = torch.tensor(tokens, dtype=torch.int32, device=device)
    op(logits, rows, own, amounts.to(device), out)
    assert (out[count:] == 99).all()
    slots = 1 + MAX_LOGPROBS
    line = out[:count].cpu()
    return line[:, 0], line[:, 1], line[:, 2 : 2 + slots], line[:, 2 + slots :].view(torch.float32)


def check_logprobs(op: Any, logits: Tensor, tokens: list[int], wanted: list[int]) -> None:
    """Compares with float64 and a stable sort."""
    positions, ranks, ids, values = logprobs(op, logits, tokens, wanted)
    exact = logits.cpu().double().log_softmax(-1)
    for row, amount in enumerate(wanted):
        if amount < 0:
            assert (ids[row] == 99).all()
            assert ranks[row] == positions[row] == 99
            continue
        token = max(0, tokens[row])
        raw = logits[row].cpu().float()
        best = raw.sort(descending=True, stable=True).indices[:amount].tolist()
        assert positions[row] == row * 7 + 1
        assert ranks[row] == (raw > raw[token]).sum() + 1
        named = [token, *best]
        assert ids[row, : len(named)].tolist() == named
        found = values[row, : len(named)].double()
        torch.testing.assert_close(found, exact[row, named], atol=2e-5, rtol=1e-5)


LOGPROBS = [
    pytest.param(reference.token_logprobs, id="twin"),
    pytest.param(token_logprobs, id="kernel"),
]


@pytest.mark.parametrize("op", LOGPROBS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "masked"])
def test_token_logprobs(kernel_device: str, op: Any, dtype: torch.dtype, kind: str) -> None:
    """In flat rows more candidates remain than the kernel sorts, if 100 are requested."""
    make = torch.Generator().manual_seed(5)
    logits = torch.randn(7, VOCAB, generator=make)
    logits *= 0.01 if kind == "flat" else 4.0
    if kind == "ties":
        logits = logits.round()
    if kind == "masked":
        logits[:, 100:5000] = -math.inf
    tokens = [0, VOCAB - 1, 77, 5, 2048, 3, -1]
    if kind == "masked":
        tokens = [0, VOCAB - 1, 77, 5, 20, 3, -1]
    wanted = [0, 5, 30, -1, 1, -2, 20]
    if kind in ("flat", "masked"):
        wanted[1] = 100
    check_logprobs(op, logits.to(dtype).to(kernel_device), tokens, wanted)


@pytest.mark.parametrize("op", LOGPROBS)
@pytest.mark.parametrize("vocab", [1, 3, 97, 128, 129, 2048, 2049])
def test_token_logprobs_of_small_vocabularies(kernel_device: str, op: Any, vocab: int) -> None:
    """An answer has no more alternatives than there are tokens."""
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    tokens = [0, vocab - 1, vocab // 2, 0]
    check_logprobs(op, logits.to(kernel_device), tokens, [0, 1, 100, 5])


@pytest.mark.parametrize("op", LOGPROBS)
def test_token_logprobs_of_a_wider_table(kernel_device: str, op: Any) -> None:
    """Entries outside the rows do not count."""
    table = torch.full((3, 700), 50.0, device=kernel_device)
    table[:, :600] = torch.randn(3, 600, generator=torch.Generator().manual_seed(6))
    check_logprobs(op, table[:, :600], [1, 599, 300], [5, 100, 0])


def cuts_of(case: Lanes, logits: Tensor, **keywords: Any) -> Tensor:
    """Returns which tokens the rows' cuts keep, bool [N, V]."""
    cuts = torch.zeros(len(logits) + 1, 2, dtype=torch.int32, device=logits.device)
    case.run(logits, cuts=cuts, **keywords)
    low = cuts[:-1, 0].clone().view(torch.float32).unsqueeze(1)
    x = logits.float() / case.floats[case.lanes, 0:1]
    return (x > low) | ((x == low) & (torch.arange(VOCAB) <= cuts[:-1, 1:2].to(x.device)))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_cuts(kernel_device: str, sampler: Any, spread: float) -> None:
    """A cut keeps the tokens that truncation keeps, ties included."""
    make = torch.Generator().manual_seed(8)
    rows = ROWS[1:]
    logits = (spread * torch.randn(len(rows), VOCAB, generator=make)).to(kernel_device)
    logits[:, 7:50] = logits[:, 6:7]
    case = Lanes(rows, kernel_device)
    case.op = sampler
    kept = torch.isfinite(case.scores(logits))
    different = (cuts_of(case, logits) != kept).sum(dim=1)
    # Where many tokens reach the mass together, sums in another order may keep one more or less.
    assert (different <= (43 if spread < 1 else 0)).all(), different
    assert (different == 0).sum() >= len(rows) - 3


@pytest.mark.parametrize("op", LOGPROBS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_of_modes(kernel_device: str, op: Any, dtype: torch.dtype) -> None:
    make = torch.Generator().manual_seed(9)
    rows = [(0.7, 5, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (0.0, 5, 1.0, 0.0), (0.5, 0, 1.0, 0.0)] * 4
    raw = (3 * torch.randn(len(rows), VOCAB, generator=make)).to(dtype).to(kernel_device)
    logits = raw.clone()
    logits[:, ::2] -= 1.0
    logits[:, 40:60] = -math.inf
    case = Lanes(rows, kernel_device)
    case.op = reference.sample
    cuts = torch.zeros(len(rows), 2, dtype=torch.int32, device=kernel_device)
    tokens = case.run(logits, cuts=cuts)
    modes, wanted = (torch.zeros(len(case.ints), dtype=torch.int32) for _ in range(2))
    modes[case.lanes] = torch.arange(4, dtype=torch.int32).repeat_interleave(4)
    wanted[case.lanes] = torch.tensor([20, 1, 0, 7, 3, 20, 20, 0] * 2, dtype=torch.int32)
    sizes = torch.zeros(len(rows), dtype=torch.int32, device=kernel_device)
    lines = torch.full((len(rows), WIDTH), 99, dtype=torch.int32, device=kernel_device)
    places = LogitRows(case.lanes.int(), case.lanes.int(), case.position, case.lanes.int())
    op(
        raw, places, tokens, wanted.to(kernel_device), lines,
        ProcessedLogits(logits, modes.to(kernel_device), case.floats[:, 0], cuts, sizes),
    )  # fmt: skip
    slots = 1 + MAX_LOGPROBS
    values = lines[:, 2 + slots :].contiguous().view(torch.float32)
    for row, (temperature, top_k, top_p, _) in enumerate(rows):
        mode = row // 4
        x = raw[row].double()
        if mode & 1:
            x = (logits[row].float() / (temperature or 1.0)).double()
            if temperature:
                cut = top_k or VOCAB, top_p
                x = truncate.top_k_top_p(
                    x[None].float(), torch.tensor(cut[:1]), torch.tensor(cut[1:])
                )[0].double()
        expected = x if mode & 2 else x.log_softmax(0)
        token, amount = int(tokens[row]), int(wanted[case.lanes[row]])
        best = x.sort(descending=True, stable=True).indices[:amount].tolist()
        best = [each if x[each] > -math.inf else -1 for each in best]
        assert lines[row, 1] == (x > x[token]).sum() + 1
        assert lines[row, 2 : 3 + amount].tolist() == [token, *best]
        assert sizes[row] == (x > -math.inf).sum()
        for place, each in enumerate([token, *best]):
            if each >= 0:
                assert abs(values[row, place] - expected[each]) < 3e-5
