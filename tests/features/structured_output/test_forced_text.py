"""Text that a grammar forces is drafted: the same texts and distribution, in fewer steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.features.speculation.verifier import Verifier
from quire.features.structured_output.compiler import Compiler
from quire.features.structured_output.forced_text import (
    DraftCosts,
    ForcedText,
    ForcedTextFinder,
    write_forced,
)
from quire.features.structured_output.masks import GrammarState, MaskBuilder, MaskRow
from quire.sampling_params import StructuredOutputsParams
from tests.features.structured_output.conftest import of_schema
from tests.features.structured_output.test_engine import DATES, PERSON
from tests.slow import slow

ADDRESS = {
    "type": "object",
    "properties": {
        "given_name": {"enum": ["Ann", "Bob"]},
        "family_name": {"enum": ["Archer", "Baker"]},
        "street_address": {"type": "string", "pattern": "^[A-Z][a-z]{1,6}$"},
        "country_of_residence": {"const": "Switzerland"},
        "number_of_children": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["given_name", "family_name", "street_address", "country_of_residence",
                 "number_of_children"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip
FORCED: dict[str, Any] = {"structured_outputs_drafts": 5}
SUFFIX = {"speculative": {"method": "suffix", "lookup_min": 16, "lookup_max": 16}}


def asks(schema: Any, **options: Any) -> SamplingParams:
    wanted = StructuredOutputsParams(json=json.dumps(schema))
    return SamplingParams(structured_outputs=wanted, **{"max_tokens": 120, **options})


PARAMS = [
    asks(ADDRESS, seed=1),
    asks(ADDRESS, temperature=0.0),
    asks(PERSON, seed=2, n=2),
    asks(DATES, seed=3),
    asks(ADDRESS, seed=4, logprobs=2, presence_penalty=0.7, top_p=0.9),
    asks(ADDRESS, seed=5, stop=["Switz"]),
    asks(ADDRESS, seed=6, max_tokens=17),
    asks(ADDRESS, seed=7, min_tokens=40),
    SamplingParams(temperature=0.9, seed=8, max_tokens=30, ignore_eos=True),
    SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="abcdefghijkl[xy]mnopq"), seed=9
    ),
]
PROMPTS = [f"Record {i}:" for i in range(len(PARAMS))]


class Engines(dict[str, LLM]):
    """Engines by name, which begin when they are asked for."""

    def __init__(self, **settings: dict[str, Any]) -> None:
        super().__init__()
        self._settings = settings

    def __missing__(self, name: str) -> LLM:
        sizes: dict[str, Any] = {"num_kv_blocks": 300, "max_model_len": 256, "max_num_seqs": 16}
        self[name] = LLM(**sizes, **self._settings[name])
        return self[name]


@pytest.fixture(scope="module")
def llms() -> Iterator[dict[str, LLM]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verifier, "seconds", lambda hook, program, graphs: {})
        made = Engines(
            plain={},
            one=SUFFIX | FORCED,
            two=SUFFIX | FORCED | {"steps_in_flight": 2},
            alone={"structured_outputs_drafts": 5, "steps_in_flight": 2},
            draft={"speculative": {"method": "draft"}, "steps_in_flight": 2} | FORCED,
        )
        yield made
        for llm in made.values():
            llm.shutdown()


def answers(llm: LLM, params: list[SamplingParams] = PARAMS) -> list[Any]:
    outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    return [
        (
            c.text,
            list(c.token_ids),
            c.finish_reason,
            [
                {token: pytest.approx(one.logprob, abs=2e-3) for token, one in place.items()}
                for place in c.logprobs or ()
            ],
        )
        for output in outputs
        for c in output.outputs
    ]


@pytest.mark.parametrize("name", ["one", "alone", slow("two"), slow("draft")])
def test_the_same_texts_in_fewer_steps(llms: dict[str, LLM], name: str) -> None:
    expected = answers(llms["plain"])
    llm = llms[name]
    assert answers(llm) == expected
    before = llm.stats().steps
    assert answers(llm, PARAMS[:1]) == expected[:1]
    tokens = len(expected[0][1])
    # Most of this document is forced, and the first token of each run is not drafted.
    assert llm.stats().steps - before < 0.75 * tokens


def test_off(llms: dict[str, LLM]) -> None:
    """A request may refuse drafts."""
    llm = llms["one"]
    before = llm.stats().steps
    params = asks(ADDRESS, seed=1, speculative="off")
    found = answers(llm, [params])
    assert found == answers(llms["plain"], PARAMS[:1])
    assert llm.stats().steps - before >= len(found[0][1])


def test_the_distribution_is_that_without_drafts(llms: dict[str, LLM]) -> None:
    """Chi-square of what is chosen between forced texts."""
    wanted = StructuredOutputsParams(regex="[ab] is followed by [cde]")
    counts = []
    for name, seed in (("plain", 1), ("alone", 2)):
        params = SamplingParams(
            structured_outputs=wanted, temperature=1.5, seed=seed, n=128, max_tokens=20
        )
        output = llms[name].generate("A letter", params, use_tqdm=False)[0]
        counts.append(Counter(completion.text for completion in output.outputs))
    kinds = sorted({*counts[0], *counts[1]})
    table = np.array([[count[kind] for kind in kinds] for count in counts], dtype=float)
    large = table[:, table.sum(axis=0) >= 10]
    table = np.column_stack([large, (table.sum(axis=1) - large.sum(axis=1))[:, None]])
    table = table[:, table.sum(axis=0) > 0]
    mean = table.sum(axis=0) / 2
    freedom = table.shape[1] - 1
    assert freedom > 2
    # The mean of chi-square is the freedom, its variance twice that.
    assert ((table - mean) ** 2 / mean).sum() < freedom + 4 * np.sqrt(2 * freedom)


# -- parts ---------------------------------------------------------------------------------------


def test_a_text_after_a_position() -> None:
    text = ForcedText(4, (7, 8, 9))
    assert [text.after(place) for place in (3, 4, 6, 7, 9)] == [(), (7, 8, 9), (9,), (), ()]


@pytest.mark.parametrize(
    ("forced", "drafts", "written"),
    [
        ([3], [], [{3}]),
        ([3, 40], [3], [{3}, {40}]),
        ([3, 40, 5], [3, 41, 6], [{3}, {40}, None, None]),
        ([3, 40, 5], [4, 1], [{3}, None, None]),
        ([3], [3], False),
        ([3, 40], [3, 40, 7], False),
    ],
)
def test_the_masks_of_forced_tokens(forced: list[int], drafts: list[int], written: Any) -> None:
    lines = np.full((1 + len(drafts), 2), 99, dtype=np.int32)
    found = write_forced(forced, drafts, lines)
    assert found == bool(written)
    if not written:
        assert (lines == 99).all()
        return
    bits = np.unpackbits(lines.view(np.uint8), axis=1, bitorder="little")
    for line, tokens in zip(bits, written, strict=True):
        assert set(np.flatnonzero(line).tolist()) == (set(range(64)) if tokens is None else tokens)


def test_masks_are_those_of_llguidance(compiler: Compiler) -> None:
    """At every place of documents that are walked at random, with and without the finder."""
    builder, draw = MaskBuilder(compiler.vocab_size), np.random.default_rng(0)
    forced = 0
    for schema in (ADDRESS, PERSON, DATES):
        grammar = compiler.compile(of_schema(schema)).result()
        with_finder, without = GrammarState(5, forced=ForcedTextFinder()), GrammarState(5)
        for state in (with_finder, without):
            state.begin(grammar)
        for _ in range(60):
            masks = np.zeros((4, -(-compiler.vocab_size // 32)), dtype=np.int32)
            finder = with_finder.forced
            assert finder is not None
            text = finder.text.after(with_finder.position)
            drafts = tuple(text[: draw.integers(0, 2)])
            for line, state in ((0, with_finder), (2, without)):
                row = MaskRow(state, 1 + len(drafts), drafts)
                builder.build([row], masks[line:], compiler.tokenizer_vocab)
            assert np.array_equal(masks[: 1 + len(drafts)], masks[2 : 3 + len(drafts)])
            allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
            forced += len(allowed) == 1
            token = int(draw.choice(allowed))
            if token in compiler.eos_token_ids:
                break
            for state in (with_finder, without):
                state.advance([token])
    assert forced > 30


def test_drafts_that_do_not_pay() -> None:
    costs = DraftCosts({"decode": {4: 1.0, 8: 1.1}, "verify": {8: 1.3, 16: 2.0}})
    assert not costs.pays(4, 1)
    assert costs.pays(4, 2)
    assert not costs.pays(8, 6)
    assert costs.pays(8, 80)
    assert DraftCosts({}).pays(8, 1)


def test_stages_refuse_the_setting() -> None:
    """Earlier stages know only of other drafts."""
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 2") as caught:
        LLM(structured_outputs_drafts=3, pipeline_parallel_size=2)
    assert caught.value.param == "structured_outputs_drafts"
