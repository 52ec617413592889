"""Beam search: the same sequences as transformers, and the ends of the search."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import LLM, BeamSearchParams, SamplingParams
from quire.engine.loop.beam_search import BeamSearch
from quire.errors import RequestError
from quire.outputs import Logprob

EMBEDDED = Path(quire.__file__).parent / "embedded" / "quire-tiny"
PROMPTS = ["Once upon a time", "The dog said", "A king"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM(device="cpu", num_kv_blocks=400, max_model_len=192)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def oracle() -> Any:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    return transformers.AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)


@pytest.mark.parametrize(
    ("width", "penalty", "tokens", "ends"),
    [(1, 1.0, 6, ()), (4, 1.0, 12, ()), (3, 0.0, 10, (13, 15)), (5, 2.0, 8, (13,))],
)
def test_sequences_are_those_of_transformers(
    llm: LLM, oracle: Any, width: int, penalty: float, tokens: int, ends: tuple[int, ...]
) -> None:
    import torch

    encode = llm.get_tokenizer().encode
    # Common tokens of this vocabulary, so that sequences end.
    ends = tuple(int(encode(text, add_special_tokens=False)[-1]) for text in (".", " a"))[
        : len(ends)
    ]
    params = BeamSearchParams(
        beam_width=width, max_tokens=tokens, length_penalty=penalty, stop_token_ids=ends
    )
    found = llm.beam_search(PROMPTS, params)
    eos = [*llm.config.eos_token_ids, *ends]
    for prompt, output in zip(PROMPTS, found, strict=True):
        ids = encode(prompt)
        assert output.prompt_token_ids == ids.tolist()
        with torch.inference_mode():
            theirs = oracle.generate(
                torch.tensor([ids.tolist()]),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=tokens,
                do_sample=False,
                length_penalty=penalty,
                eos_token_id=eos,
                pad_token_id=0,
                early_stopping=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
        assert len(output.sequences) == width
        for mine, sequence in zip(output.sequences, theirs.sequences.tolist(), strict=True):
            expected = sequence[len(ids) :]
            assert mine.token_ids == expected[: len(mine.token_ids)]
            assert set(expected[len(mine.token_ids) :]) <= {eos[0]}, "it fills up with that"
            assert mine.finish_reason == ("stop" if mine.token_ids[-1] in eos else "length")
        if width > 1:
            scores = [sequence.score for sequence in output.sequences]
            assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)


def test_a_sequence_has_text_tokens_and_logprobs(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
    (output,) = llm.beam_search("Once upon a time", params)
    best = output.sequences[0]
    assert best.text == llm.get_tokenizer().decode(best.token_ids)
    logprobs = [
        entry[token].logprob for token, entry in zip(best.token_ids, best.logprobs, strict=True)
    ]
    assert sum(logprobs) == pytest.approx(best.cum_logprob)
    assert best.score == pytest.approx(best.cum_logprob / 5)
    assert [s.score for s in output.sequences] == sorted(
        (s.score for s in output.sequences), reverse=True
    )
    assert len({tuple(s.token_ids) for s in output.sequences}) == 3
    greedy = llm.generate(
        "Once upon a time",
        quire.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
        use_tqdm=False,
    )
    (alone,) = llm.beam_search(
        "Once upon a time", BeamSearchParams(beam_width=1, max_tokens=5, ignore_eos=True)
    )
    assert alone.sequences[0].token_ids == greedy[0].outputs[0].token_ids


def test_up_to_the_end_of_the_context(llm: LLM) -> None:
    longest = llm.config.scheduler.max_model_len
    prompt = [5, 6, 7] * (longest // 3)
    params = BeamSearchParams(beam_width=2, max_tokens=None, ignore_eos=True)
    (output,) = llm.beam_search([prompt[: longest - 2]], params)
    assert [len(s.token_ids) for s in output.sequences] == [2, 2]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 65}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"beam_width": 2, "length_penalty": "1"}, "length_penalty"),
        ({"beam_width": 2, "ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_wrong_parameters(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**fields)
    assert caught.value.param == param


def test_too_many_alternatives(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=64, stop_token_ids=tuple(range(40)))
    with pytest.raises(RequestError) as caught:
        llm.beam_search("a", params)
    assert caught.value.param == "beam_width"


def _advance(search: BeamSearch, *found: dict[int, float]) -> None:
    search.advance([{token: Logprob(value, 1) for token, value in each.items()} for each in found])


def test_a_search_continues_while_a_longer_sequence_may_score_better(llm: LLM) -> None:
    """Scores are normalized by length: -1.34 of two tokens is better than -0.7 of one."""
    end = llm.config.eos_token_ids[0]
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=9), llm.config, 1)
    _advance(search, {7: -0.69, end: -0.7, 8: -3.0})
    assert search.beams == [[7], [8]]
    _advance(search, {end: -0.6, 9: -0.65}, {9: -9.0})
    assert not search.over
    _advance(search, {end: -0.01, 9: -9.0}, {9: -9.0})
    assert search.over
    best = search.best(2, [5], SamplingParams(detokenize=False), None)
    assert [sequence.token_ids for sequence in best] == [[7, 9, end], [7, end]]
    assert [sequence.score for sequence in best] == pytest.approx([-1.35 / 3, -1.29 / 2])


def test_a_search_ends_where_no_longer_sequence_may_score_better(llm: LLM) -> None:
    end = llm.config.eos_token_ids[0]
    search = BeamSearch(BeamSearchParams(beam_width=1, max_tokens=9), llm.config, 1)
    _advance(search, {end: -0.5, 7: -0.6})
    assert search.over
