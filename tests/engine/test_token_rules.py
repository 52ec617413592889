"""Tokens that a request may not generate are not in its masks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire import LLM, SamplingParams
from quire.arrays import Int32
from quire.errors import RequestError
from quire.features.structured_output.masks import GrammarState, MaskBuilder, MaskRow
from quire.sampling_params import StructuredOutputsParams, TokenRules
from quire.text.tokenizer import Tokenizer
from tests.models.small_tokenizer import save_tokenizer
from tests.tiny_engine import TINY, model_folder

VOCAB = 40
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3)

EMBEDDED = Path(quire.__file__).parent / "embedded" / "quire-tiny"


def bits(mask: Int32) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def expected(allowed: list[int], bad: list[list[int]], before: list[int]) -> set[int]:
    """Returns every allowed token that completes no bad sequence."""
    return {
        token
        for token in allowed or range(VOCAB)
        if not any([*before, token][-len(sequence) :] == sequence for sequence in bad)
    }


@given(
    st.lists(st.integers(0, VOCAB - 1), max_size=8), st.lists(TOKENS, max_size=6), TOKENS, TOKENS
)
def test_masks_follow_the_rules(
    allowed: list[int], bad: list[list[int]], before: list[int], drafts: list[int]
) -> None:
    try:
        rules = TokenRules(allowed, bad, VOCAB)
    except RequestError:
        assert not expected(allowed, [one for one in bad if len(one) == 1], [])
        return
    walked = GrammarState(0, rules=rules)
    walked.advance(before)
    # A token that the rules forbid appears only if no token is allowed there.
    held = all(token in expected(allowed, bad, before[:i]) for i, token in enumerate(before))
    assert (walked.error is None) == held
    state = GrammarState(0, rules=rules, last=before)
    masks = np.zeros((1 + len(drafts), 2), dtype=np.int32)
    MaskBuilder(VOCAB).build([MaskRow(state, len(masks), drafts)], masks, 0)
    wanted = [expected(allowed, bad, before + drafts[:i]) for i in range(len(masks))]
    assert (state.error is None) == bool(wanted[0])
    for mask, tokens in zip(masks, wanted, strict=True):
        if state.error is None and tokens:
            assert bits(mask) == tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["x"]}, "allowed_token_ids"),
        ({"allowed_token_ids": 5}, "allowed_token_ids"),
        ({"allowed_token_ids": range(100_001)}, "allowed_token_ids"),
        ({"allowed_token_ids": list(range(100_001))}, "allowed_token_ids"),
        ({"bad_token_ids": [1]}, "bad_token_ids"),
        ({"bad_token_ids": [[]]}, "bad_token_ids"),
        ({"bad_token_ids": [[1] * 65]}, "bad_token_ids"),
        ({"bad_token_ids": [[1]] * 257}, "bad_token_ids"),
        ({"bad_token_ids": [[2**31]]}, "bad_token_ids"),
    ],
)
def test_wrong_rules(fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_the_engine_follows_the_rules() -> None:
    llm = LLM(num_kv_blocks=300, max_model_len=512, max_num_seqs=8)
    prompt = "Once upon a time"
    greedy = {"temperature": 0.0, "max_tokens": 24}
    (free,) = llm.generate([prompt], SamplingParams(**greedy))
    tokens = free.outputs[0].token_ids
    single, pair = (tokens[2],), (tokens[3], tokens[4])
    some = sorted(set(tokens[:6]))
    structured = StructuredOutputsParams(regex="[0-9]{30}")
    digits = Tokenizer.from_path(EMBEDDED).encode("1", add_special_tokens=False)[-1:].tolist()
    banned, sequence, few, both, again = llm.generate(
        [prompt] * 5,
        [
            SamplingParams(bad_token_ids=(single,), **greedy),
            SamplingParams(bad_token_ids=(pair,), **greedy),
            SamplingParams(allowed_token_ids=tuple(some), min_tokens=8, **greedy),
            SamplingParams(bad_token_ids=(digits,), structured_outputs=structured, **greedy),
            SamplingParams(**greedy),
        ],
    )
    assert single[0] not in banned.outputs[0].token_ids
    found = sequence.outputs[0].token_ids
    assert found[:4] == tokens[:4]
    assert pair not in list(pairwise(found))
    assert set(few.outputs[0].token_ids) <= set(some)
    assert len(few.outputs[0].token_ids) >= 8
    assert both.outputs[0].text.isdigit()
    assert digits[0] not in both.outputs[0].token_ids
    assert again.outputs[0].token_ids == tokens
    for wrong in ({"allowed_token_ids": (10**6,)}, {"bad_token_ids": ((1, 10**6),)}):
        with pytest.raises(RequestError, match="vocabulary ends"):
            llm.generate([prompt], SamplingParams(**wrong))


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[LLM]:
    """An engine with a tokenizer that grammars cannot be used with."""
    save_tokenizer(model_folder(tmp_path, TINY))
    llm = LLM(str(tmp_path), load_format="dummy", num_kv_blocks=20, max_model_len=64)
    yield llm
    llm.shutdown()


def test_token_rules_work_without_a_tokenizer_for_grammars(tiny: LLM) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7]}
    with pytest.raises(RequestError, match="of a kind that grammars cannot be used with"):
        tiny.generate(prompt, SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
    rules = SamplingParams(allowed_token_ids=(8, 9), temperature=0.0, max_tokens=4, ignore_eos=True)
    (output,) = tiny.generate(prompt, rules)
    assert output.outputs[0].finish_reason == "length"
    assert set(output.outputs[0].token_ids) <= {8, 9}


def test_token_rules_that_never_apply_change_nothing(tiny: LLM) -> None:
    """An ignored end token is like other tokens, with and without a mask, and may come before
    `min_tokens`."""
    (eos,) = tiny.config.eos_token_ids
    given = {"temperature": 0.0, "max_tokens": 6, "min_tokens": 4, "logit_bias": {eos: 100.0}}
    for ignored in (True, False):
        found = [
            tiny.generate([[5, 6, 7]], SamplingParams(ignore_eos=ignored, **given, **rules))
            for rules in ({}, {"bad_token_ids": ((7, 8, 9, 10),)})
        ]
        free, ruled = (output.outputs[0].token_ids for (output,) in found)
        assert free == ruled
        assert (free[0] == eos) == ignored
