"""Drafts in a step: the accepted tokens are those of a plain definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import ops
from quire.ops import Drafts, LogitRows, StepRows
from quire.ops.reference.step import ENDED
from quire.plan import NO_CLAIM, RowFlag, StopReason
from tests.slow import examples

LANES, MAX_LEN, WIDTH, VOCAB = 4, 24, 8, 5
MOST = 3
"""Drafts of a row."""


@dataclass
class Row:
    """A generating row, and the tokens that the target would draw.

    Attributes:
        text: the known tokens; the row computes the last of them first.
        truth: [MAX_LEN + 1], the token that the target draws at each position if all tokens before
            it are the target's; -1 if its logits are broken.
    """

    lane: int
    text: list[int]
    room: int
    claim: list[int]
    start: int
    truth: list[int]
    stops: list[int]
    min_total: int
    max_total: int


@st.composite
def steps(draw: st.DrawFn) -> list[Row]:
    token = st.integers(0, VOCAB - 1)
    lanes = draw(st.lists(st.integers(0, LANES - 1), min_size=1, unique=True))
    rows = []
    for lane in lanes:
        length = draw(st.integers(1, MAX_LEN - MOST - 1))
        text = draw(st.lists(token, min_size=length, max_size=length))
        later = st.one_of(token, token, token, token, token, token, st.just(-1))
        truth = [*text, *draw(st.lists(later, min_size=MAX_LEN, max_size=MAX_LEN))]
        start = draw(st.one_of(st.integers(max(0, length - WIDTH), length + 1), st.just(NO_CLAIM)))
        claim = draw(st.lists(st.integers(-1, VOCAB - 1), min_size=WIDTH, max_size=WIDTH))
        if start <= length and draw(st.booleans()):
            # Right up to some place.
            right = draw(st.integers(0, WIDTH))
            claim[:right] = truth[start : start + right]
        rows.append(
            Row(
                lane,
                text,
                draw(st.integers(0, MOST)),
                claim,
                start,
                truth,
                draw(st.lists(token, max_size=2)),
                draw(st.integers(0, MAX_LEN)),
                draw(st.integers(length + 1, MAX_LEN)),
            )
        )
    return rows


def usable(row: Row) -> list[int]:
    """Returns the row's drafts."""
    known = len(row.text) - row.start
    if known < 0 or row.claim[:known] != row.text[row.start :]:
        return []
    drafts: list[int] = []
    for token in row.claim[known : known + row.room]:
        if token < 0:
            break
        drafts.append(token)
    return drafts


def accepted(row: Row) -> tuple[list[int], StopReason]:
    """The tokens that the row gives: as if it were computed one at a time, for as long as the
    drafts are what comes out."""
    text, given = list(row.text), []
    for draft in [*usable(row), None]:
        token = row.truth[len(text)]
        if token < 0:
            return given, StopReason.BROKEN
        given.append(token)
        text.append(token)
        if token in row.stops and len(text) > row.min_total:
            return given, StopReason.STOP_TOKEN
        if len(text) >= row.max_total:
            return given, StopReason.LENGTH
        if token != draft:
            break
    return given, StopReason.NONE


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(width: int, values: dict[int, list[int]], fill: int = -1) -> Tensor:
    """Returns a column whose lines begin with the given values of their lanes."""
    column = torch.full((LANES, width), fill, dtype=torch.int32)
    for lane, line in values.items():
        column[lane, : len(line)] = ints(line)
    return column


def column(rows: list[Row], values: list[int]) -> Tensor:
    out = torch.zeros(LANES, dtype=torch.int32)
    out[[row.lane for row in rows]] = ints(values)
    return out


@settings(max_examples=examples(300))
@given(steps(), st.integers(0, 6), st.booleans())
def test_the_accepted_run_matches_the_definition(
    rows: list[Row], chunk: int, counted: bool
) -> None:
    """The batch also has a chunk of another lane's prompt, and padding."""
    lanes = [row.lane for row in rows]
    free = [lane for lane in range(LANES) if lane not in lanes]
    prompt = free[:1] if chunk else []
    spans = [1 + row.room for row in rows]
    q_lens = ints([0, *spans, *([chunk] if prompt else []), 0])
    counts = ints([0, *spans, *([0] if prompt else []), 0])
    flags = [RowFlag.SAMPLE] * len(rows) + [RowFlag.PROMPT] * len(prompt) + [0]
    step = StepRows(
        ints([*lanes, *prompt, -1]), q_lens.cumsum(0).int(), counts.cumsum(0).int(), ints(flags)
    )
    tokens = table(MAX_LEN, {row.lane: row.text for row in rows}, fill=0)
    position = column(rows, [len(row.text) - 1 for row in rows])
    drafts = Drafts(
        table(WIDTH, {row.lane: row.claim for row in rows}),
        column(rows, [row.start for row in rows]),
        torch.full((LANES,), 77, dtype=torch.int32),
    )
    total, logits = int(q_lens.sum()), int(counts.sum())
    asked = LogitRows(*torch.full((4, logits + 2), 7, dtype=torch.int32))

    ops.place_drafts(step, position, tokens, drafts)
    batch = ops.expand_rows(
        step, position, tokens, [(torch.zeros(LANES, MAX_LEN, dtype=torch.int32), 1)], asked,
        num_tokens=total + 3, max_seq_len=MAX_LEN, drafts=drafts,
    )  # fmt: skip
    at = 0
    for row, span in zip(rows, spans, strict=True):
        inputs = [row.text[-1], *usable(row)]
        unused = [-1] * (span - len(inputs))
        first = len(row.text) - 1
        assert batch.ids[at : at + span].tolist() == inputs + unused
        held = len(inputs)
        assert batch.positions[at : at + held].tolist() == list(range(first, first + held))
        assert asked.lanes[at : at + span].tolist() == [row.lane] * held + unused
        assert asked.lengths[at : at + held].tolist() == list(range(first + 1, first + 1 + held))
        assert asked.ahead[at : at + held].tolist() == list(range(held))
        at += span
    assert asked.lanes[logits:].tolist() == [-1, -1]

    # The target samples at every position; after a wrong draft it may sample anything.
    sampled = torch.full((logits + 2,), 3, dtype=torch.int32)
    at = 0
    for row, span in zip(rows, spans, strict=True):
        for place in range(1 + len(usable(row))):
            length = len(row.text) + place
            sampled[at + place] = row.truth[length] if length < MAX_LEN + 1 else 0
        at += span
    seen = torch.zeros(LANES, VOCAB, dtype=torch.int32) if counted else None
    results = torch.full((len(step.lanes), 3 + MOST), 99, dtype=torch.int32)
    before = position.clone()
    ops.finish_rows(
        step, asked, sampled, results, position=position, tokens=tokens,
        max_total=column(rows, [row.max_total for row in rows]),
        min_total=column(rows, [row.min_total for row in rows]),
        num_stops=column(rows, [len(row.stops) for row in rows]),
        stops=table(3, {row.lane: row.stops for row in rows}, fill=1),
        counts=seen,
    )  # fmt: skip
    for line, row in enumerate(rows):
        given_tokens, reason = accepted(row)
        count = len(given_tokens)
        empty = [-1] * (1 + MOST - count)
        assert results[line].tolist() == [count, reason, *given_tokens, *empty]
        ended = reason in (StopReason.STOP_TOKEN, StopReason.LENGTH)
        assert position[row.lane] == (ENDED if ended else len(row.text) - 1 + count)
        assert tokens[row.lane, : len(row.text) + count].tolist() == row.text + given_tokens
        if seen is not None:
            assert seen[row.lane].tolist() == [2 * given_tokens.count(t) for t in range(VOCAB)]
    if prompt:
        assert results[len(rows), 0] == 0
        assert torch.equal(position[prompt], before[prompt])
