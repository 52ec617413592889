"""Masks of draft positions equal those of the same text step by step."""

from __future__ import annotations

import json

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from quire.arrays import Int32
from quire.features.structured_output.compiler import Compiler
from quire.features.structured_output.masks import GrammarState, MaskBuilder, MaskRow
from quire.sampling_params import StructuredOutputsParams, TokenRules
from quire.text.tokenizer import Tokenizer

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
    """Returns tokens that the grammar allows, and the mask before each one and after the last."""
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
    # The state has not advanced: the device may have accepted no draft.
    assert (build(compiler, MaskRow(state))[0] == masks[0]).all()


def test_positions_after_a_refused_draft_allow_everything(compiler: Compiler) -> None:
    tokens, masks = step_by_step(compiler, 1)
    wrong = some_token(~masks[1])
    state = state_of(compiler)
    found = build(compiler, MaskRow(state, 5, [tokens[0], wrong, tokens[0]]))
    assert (found[:2] == np.stack(masks)).all()
    assert (found[2:] == -1).all()
    assert state.error is None


def test_tokens_that_the_tokenizer_has_not_are_refused(compiler: Compiler) -> None:
    tokens, masks = step_by_step(compiler, 1)
    state = state_of(compiler)
    found = build(compiler, MaskRow(state, 4, [*tokens, compiler.vocab_size - 1, tokens[0]]))
    assert (found[:2] == np.stack(masks)).all()
    assert (found[2:] == -1).all()
    assert state.error is None


def test_a_draft_beyond_the_limits_breaks_no_request(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft that exceeds a grammar's work limit does not end the request.

    Masks before the draft are the same as without drafts."""
    limits = LLParserLimits(
        initial_lexer_fuel=2_000_000, step_lexer_fuel=1_000_000, step_max_items=60,
        max_lexer_states=1_000_000, max_grammar_size=250_000, verbose_errors=False,
    )  # fmt: skip
    monkeypatch.setattr("quire.features.structured_output.compiler._LIMITS", limits)
    small = Compiler(tokenizer.hub.to_str, tokenizer.vocab_size, (6139, 6137))

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).tolist()
        return found

    asked = StructuredOutputsParams(grammar='start: "x"+ | "y" e\ne: e e | "a" | "b" e')
    grammar = small.compile(asked).result()
    drafts = ids("y") + 12 * ids("a")
    walker, expected = grammar.deep_copy(), list[Int32]()
    while True:
        words = -(-small.vocab_size // 32)
        mask = np.frombuffer(walker.compute_bitmask(), dtype=np.int32)[:words]
        if walker.is_error():
            break
        expected.append(mask)
        walker.consume_token(drafts[len(expected) - 1])
    assert 1 < len(expected) < len(drafts)
    state = GrammarState(position=2)
    state.begin(grammar)
    found = build(small, MaskRow(state, 1 + len(drafts), drafts, text=()))
    assert state.error is None
    assert (found[: len(expected)] == np.stack(expected)).all()
    assert (found[len(expected) :] == -1).all()
    # It goes on, with another token than was drafted.
    state.advance(ids("x"))
    assert state.error is None
    build(small, MaskRow(state))
    assert state.error is None
    assert isinstance(state.matcher, LLMatcher)
    small.shutdown()


def test_a_draft_that_leaves_nothing_to_follow_ends_the_request(compiler: Compiler) -> None:
    """The same holds if the only drawn token is refused."""
    state = GrammarState(position=2, rules=TokenRules([7], [[7, 7]], compiler.vocab_size))
    found = build(compiler, MaskRow(state, 2, [7]))
    assert (found[0] == build_only(compiler, (7,))).all()
    assert (found[1] == -1).all()
    assert state.error is None
    state.advance([7, 30])
    assert state.error is not None
    assert state.error.code == "no_token"


def test_forbidden_ends_hold_for_drafts(compiler: Compiler) -> None:
    eos = compiler.eos_token_ids
    asked = StructuredOutputsParams(regex="a*")
    matcher = compiler.compile(asked).result()
    for until, free in ((4, 3), (6, 1), (7, 0)):
        state = GrammarState(4, matcher.deep_copy(), forbidden=[(eos, until)])
        first = build(compiler, MaskRow(state))
        token = some_token(first[0] & ~build_only(compiler, eos))
        found = build(compiler, MaskRow(state, 3, [token, token]))
        bits = [bool(found[i, eos[0] >> 5] >> (eos[0] & 31) & 1) for i in range(3)]
        assert bits == [False] * (3 - free) + [True] * free


def build_only(compiler: Compiler, tokens: tuple[int, ...]) -> Int32:
    """Returns a mask that allows these tokens."""
    mask = np.zeros(-(-compiler.vocab_size // 32) * 32, dtype=np.uint8)
    mask[list(tokens)] = 1
    return np.packbits(mask, bitorder="little").view(np.int32)


def test_a_token_that_the_grammar_refuses_ends_its_request_alone(compiler: Compiler) -> None:
    tokens, masks = step_by_step(compiler, 1)
    wrong, right = state_of(compiler), state_of(compiler)
    wrong.advance([some_token(~masks[0])])
    right.advance(tokens)
    found = build(compiler, MaskRow(wrong), MaskRow(right))
    assert wrong.error is not None
    assert right.error is None
    assert (found[0] == -1).all()
    assert (found[1] == masks[1]).all()
    more = state_of(compiler)
    more.advance([*tokens, some_token(~masks[1])])
    build(compiler, MaskRow(more))
    assert more.error is not None
