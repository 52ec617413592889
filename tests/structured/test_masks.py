"""Masks of draft positions are those of the same text step by step."""

from __future__ import annotations

import json

import numpy as np

from quire.arrays import Int32
from quire.sampling_params import StructuredOutputsParams
from quire.structured.compiler import Compiler
from quire.structured.masks import GrammarState, MaskBuilder, MaskRow

_SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})


def state_of(compiler: Compiler) -> GrammarState:
    asked = StructuredOutputsParams(json=_SCHEMA)
    return GrammarState(position=4, matcher=compiler.compile(asked).result().deep_copy())


def build(compiler: Compiler, *rows: MaskRow) -> Int32:
    lines = sum(row.lines for row in rows)
    masks = np.zeros((lines, -(-compiler.vocab_size // 32)), dtype=np.int32)
    MaskBuilder(compiler.vocab_size).build(rows, masks, compiler.tokenizer_vocab)
    return masks


def some_token(mask: Int32) -> int:
    return int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[-1])


def step_by_step(compiler: Compiler, count: int) -> tuple[list[int], list[Int32]]:
    """Tokens that the grammar allows, and the mask before each and after the last."""
    state, tokens, masks = state_of(compiler), list[int](), list[Int32]()
    while True:
        masks.append(build(compiler, MaskRow(state))[0])
        if len(tokens) == count:
            return tokens, masks
        tokens.append(some_token(masks[-1]))
        state.advance(tokens[-1:])


def test_each_draft_position_has_its_mask(compiler: Compiler) -> None:
    tokens, masks = step_by_step(compiler, 3)
    state = state_of(compiler)
    found = build(
        compiler, MaskRow(None, 2), MaskRow(state, 4, tokens), MaskRow(state_of(compiler))
    )
    assert (found[:2] == -1).all()
    assert (found[2:6] == np.stack(masks)).all()
    assert (found[6] == masks[0]).all()
    assert state.error is None
    # Nothing has moved: the device may have accepted none.
    assert (build(compiler, MaskRow(state))[0] == masks[0]).all()


def test_positions_after_a_refused_draft_allow_everything(compiler: Compiler) -> None:
    tokens, masks = step_by_step(compiler, 1)
    wrong = some_token(~masks[1])
    state = state_of(compiler)
    found = build(compiler, MaskRow(state, 5, [tokens[0], wrong, tokens[0]]))
    assert (found[:2] == np.stack(masks)).all()
    assert (found[2:] == -1).all()
    assert state.error is None


def test_forbidden_ends_hold_for_drafts(compiler: Compiler) -> None:
    eos = compiler.eos_token_ids
    asked = StructuredOutputsParams(regex="a*")
    matcher = compiler.compile(asked).result()
    for until, free in ((4, 3), (6, 1), (7, 0)):
        state = GrammarState(4, matcher.deep_copy(), forbidden=eos, until=until)
        first = build(compiler, MaskRow(state))
        token = some_token(first[0] & ~build_only(compiler, eos))
        found = build(compiler, MaskRow(state, 3, [token, token]))
        bits = [bool(found[i, eos[0] >> 5] >> (eos[0] & 31) & 1) for i in range(3)]
        assert bits == [False] * (3 - free) + [True] * free


def build_only(compiler: Compiler, tokens: tuple[int, ...]) -> Int32:
    """A mask of these tokens."""
    mask = np.zeros(-(-compiler.vocab_size // 32) * 32, dtype=np.uint8)
    mask[list(tokens)] = 1
    return np.packbits(mask, bitorder="little").view(np.int32)
