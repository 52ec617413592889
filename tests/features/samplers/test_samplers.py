"""DRY, XTC, typical-p and callers' functions, against float64 twins and in whole requests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.errors import RequestError
from quire.features.samplers.hook import LONGEST_MATCH, dry_penalty, typical_p, without_top_choices
from tests.slow import examples

VOCAB = 12


def dry_twin(
    text: list[int], multiplier: float, base: float, allowed: int, last: int, breakers: set[int]
) -> Any:
    """Computes DRY by its definition, in float64."""
    penalty = np.zeros(VOCAB)
    looked = text if last < 0 else text[max(0, len(text) - last) :]
    for place, token in enumerate(looked):
        if token in breakers:
            continue
        length = 0
        while length < min(place, LONGEST_MATCH):
            if looked[place - 1 - length] != looked[-1 - length]:
                break
            if looked[-1 - length] in breakers:
                break
            length += 1
        if length >= allowed:
            penalty[token] = max(penalty[token], multiplier * base ** (length - allowed))
    return penalty


@settings(max_examples=examples(30))
@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=80),
            st.floats(0, 3),
            st.floats(1, 2),
            st.integers(1, 4),
            st.integers(-1, 30),
            st.sets(st.integers(0, 3), max_size=2),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_dry(rows: list[tuple[list[int], float, float, int, int, set[int]]]) -> None:
    width = 1 + max(len(row[0]) for row in rows)
    tokens = torch.full((len(rows), width), 3, dtype=torch.int32)
    breakers = torch.full((len(rows), 2), -1, dtype=torch.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row[0])] = torch.tensor(row[0], dtype=torch.int32)
        breakers[place, : len(row[5])] = torch.tensor(sorted(row[5]), dtype=torch.int32)
    found = dry_penalty(
        tokens,
        torch.tensor([len(row[0]) for row in rows], dtype=torch.int32),
        VOCAB,
        multiplier=torch.tensor([row[1] for row in rows]),
        base=torch.tensor([row[2] for row in rows]),
        allowed=torch.tensor([float(row[3]) for row in rows]),
        last=torch.tensor([float(row[4]) for row in rows]),
        breakers=breakers,
    )
    for mine, row in zip(found.numpy(), rows, strict=True):
        assert np.allclose(mine, dry_twin(*row), rtol=1e-4, atol=1e-6)


LOGITS = st.lists(
    st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=4
)


@settings(max_examples=examples(30))
@given(logits=LOGITS, mass=st.floats(0.05, 1.0))
def test_typical_p(logits: list[list[float]], mass: float) -> None:
    x = torch.tensor(logits)
    kept = typical_p(x, torch.full((len(x),), mass)) > -math.inf
    for row, mine in zip(x.double().numpy(), kept.numpy(), strict=True):
        logs = row - np.logaddexp.reduce(row)
        probs = np.exp(logs)
        distance = np.abs(-logs + (probs * logs).sum())
        order = np.argsort(distance, kind="stable")
        reached = np.cumsum(probs[order])
        count = int((reached < mass).sum()) + 1
        # Kept tokens are closer than dropped ones and have the asked mass, except for rounding.
        assert distance[mine].max() <= distance[~mine].min(initial=np.inf) + 1e-4
        if abs(reached - mass).min() > 1e-5:
            assert mine.sum() == min(count, VOCAB)


def test_xtc() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.9, 0.05, 0.03, 0.02]]).repeat(500, 1)
    counter = (
        torch.zeros(1000, 2, dtype=torch.int32),
        torch.zeros(1000, dtype=torch.int32),
        torch.arange(1000, dtype=torch.int32),
    )
    found = without_top_choices(
        probs.log(),
        counter,
        probability=torch.full((1000,), 0.4),
        threshold=torch.full((1000,), 0.15),
    )
    gone = found == -math.inf
    assert not gone[1::2].any(), "one choice is no choice"
    rows = gone[::2]
    assert (rows.any(1) == rows[:, 0]).all()
    assert (rows[:, 0] == rows[:, 1]).all()
    assert not rows[:, 2:].any(), "the least likely of the choices stays"
    assert 140 < int(rows[:, 0].sum()) < 260
    again = without_top_choices(
        probs.log(),
        counter,
        probability=torch.full((1000,), 0.4),
        threshold=torch.full((1000,), 0.15),
    )
    assert torch.equal(found, again)


# -- whole requests --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM(device="cpu", num_kv_blocks=200, max_model_len=256)
    yield engine
    engine.shutdown()


def run(llm: LLM, prompts: Any, *params: SamplingParams) -> list[list[int]]:
    given = list(params) if len(params) > 1 else params[0]
    outputs = llm.generate(prompts, given, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_neutral_samplers_change_nothing(llm: LLM) -> None:
    plain = SamplingParams(seed=3, max_tokens=12, top_k=20, top_p=0.9, min_p=0.01, ignore_eos=True)
    asked = {"seed": 3, "max_tokens": 12, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    with_them = SamplingParams(
        **asked,  # type: ignore[arg-type]
        ignore_eos=True,
        logits_processors=(lambda tokens, logits: logits,),
        dry_multiplier=1e-30,
        xtc_probability=1e-30,
    )
    prompts = ["Once upon a time", "The dog"]
    alone = run(llm, prompts, plain)
    assert run(llm, prompts, with_them) == alone
    assert run(llm, prompts, plain, with_them) == alone, "both in one batch"


def test_dry_ends_loops(llm: LLM) -> None:
    prompt = [300, 301, 302, 303] * 12
    greedy = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    bias = dict.fromkeys((300, 301, 302, 303), 12.0)

    def repeats(**extra: Any) -> int:
        params = SamplingParams(**greedy, logit_bias=bias, **extra)  # type: ignore[arg-type]
        (tokens,) = run(llm, [prompt], params)
        text = [*prompt, *tokens]
        return sum(text[i] == text[i - 4] for i in range(len(prompt), len(text)))

    assert repeats(dry_multiplier=20.0, dry_base=1.75) < repeats()
    broken = repeats(dry_multiplier=20.0, dry_breaker_ids=(300, 301, 302, 303))
    assert broken == repeats(), "no sequence is left"


def test_typical_p_and_xtc_change_the_drawn_tokens(llm: LLM) -> None:
    base = {"max_tokens": 10, "ignore_eos": True}
    seeds = range(3)
    prompts = ["Once upon a time"] * 3

    def drawn(**extra: Any) -> list[list[int]]:
        return run(llm, prompts, *(SamplingParams(seed=s, **base, **extra) for s in seeds))  # type: ignore[arg-type]

    plain = drawn()
    assert drawn(typical_p=0.2) != plain
    assert drawn(xtc_probability=1.0, xtc_threshold=0.05) != plain
    assert drawn(xtc_probability=1.0, xtc_threshold=0.9) == plain, "there is never a choice"
    assert drawn(xtc_probability=0.5) == drawn(xtc_probability=0.5)


def test_the_distribution_is_that_of_the_functions(llm: LLM) -> None:
    """A chi-squared test of five hundred draws from four tokens."""
    wanted = torch.tensor([0.5, 0.25, 0.15, 0.1])

    def four(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(logits, -math.inf)
        out[40:44] = wanted.log()
        return out

    params = [
        SamplingParams(seed=i, max_tokens=25, ignore_eos=True, logits_processors=(four,))
        for i in range(20)
    ]
    tokens = np.concatenate(run(llm, ["Once"] * 20, *params))
    counts = [int((tokens == 40 + i).sum()) for i in range(4)]
    assert sum(counts) == 500
    expected = wanted.numpy() * 500
    # Three degrees of freedom: once in ten thousand by chance, and the seeds are fixed.
    assert ((counts - expected) ** 2 / expected).sum() < 21.1


def test_functions_see_the_tokens_so_far(llm: LLM) -> None:
    seen: list[list[int]] = []

    def watch(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(tokens)
        assert logits.dtype == torch.float32
        return logits

    params = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, logits_processors=(watch,)
    )
    (tokens,) = run(llm, ["Once upon"], params)
    assert [list(tokens[:i]) for i in range(5)] == seen[:5]


def test_masks_come_before(llm: LLM) -> None:
    params = SamplingParams(
        seed=1, max_tokens=6, ignore_eos=True, allowed_token_ids=(70, 71, 72), typical_p=0.9
    )
    (tokens,) = run(llm, ["Once"], params)
    assert set(tokens) <= {70, 71, 72}


def test_a_function_that_fails(llm: LLM) -> None:
    def fails(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) == 2:
            raise ValueError("no")
        return logits

    params = SamplingParams(max_tokens=8, ignore_eos=True, logits_processors=(fails,))
    bad, good = llm.generate(
        ["Once", "Once"], [params, SamplingParams(max_tokens=4, ignore_eos=True)], use_tqdm=False
    )
    assert bad.outputs[0].finish_reason == "error"
    assert len(bad.outputs[0].token_ids) == 2
    assert good.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 0.0),
        ("xtc_probability", 1.5),
        ("xtc_threshold", -0.1),
        ("dry_multiplier", math.nan),
        ("dry_base", 0.5),
        ("dry_allowed_length", 0),
        ("dry_penalty_last_n", -2),
        ("dry_breaker_ids", ("a",)),
        ("dry_breaker_ids", tuple(range(257))),
        ("logits_processors", ("f",)),
        ("logits_processors", len),
    ],
)
def test_wrong_values(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_drafts_change_nothing(llm: LLM) -> None:
    prompts = [[300, 301, 302, 303] * 10, "The cat sat. The cat sat. The cat sat. The"]
    asked = [
        SamplingParams(seed=4, max_tokens=16, ignore_eos=True, **extra)  # type: ignore[arg-type]
        for extra in (
            {"dry_multiplier": 2.0, "xtc_probability": 0.5, "top_k": 3},
            {"typical_p": 0.8, "logits_processors": (lambda said, logits: logits * 3,)},
        )
    ]
    drafting = LLM(
        device="cpu", num_kv_blocks=200, max_model_len=256, speculative={"method": "suffix"}
    )
    found = run(drafting, prompts, *asked)
    drafting.shutdown()
    assert found == run(llm, prompts, *asked)
