"""Requests with grammars in the engine, together with others and under stress."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.engine.loop.core import EngineCore
from quire.errors import GrammarError, RequestError
from quire.features.structured_output.compiler import Compiler
from quire.features.structured_output.masks import MaskBuilder, MaskRow
from quire.outputs import RequestOutput
from quire.plan import StepPlan
from quire.sampling_params import StructuredOutputsParams
from tests.slow import examples, slow, some

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "pet": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pet"}]},
    },
    "required": ["name", "age", "pet"],
    "additionalProperties": False,
    "$defs": {"pet": {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}},
                      "required": ["kind"], "additionalProperties": False}},
    "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip
DATES = {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 1,
         "maxItems": 2, "x-guidance": {"whitespace_flexible": False}}  # fmt: skip
SCHEMAS: list[Any] = [PERSON, DATES]
PLAIN = [SamplingParams(max_tokens=24, temperature=0.9, seed=i, ignore_eos=True) for i in range(3)]
PROMPTS = ["Once upon a time", "A record of a person:", "The dog and the cat", "Numbers: 1, 2"]


def asks(schema: Any, **options: Any) -> SamplingParams:
    given = {"max_tokens": 120, "temperature": 1.0, "seed": 1, **options}
    return SamplingParams(
        structured_outputs=StructuredOutputsParams(json=json.dumps(schema)), **given
    )


def structured(**options: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**options)


def engine(**options: Any) -> LLM:
    return LLM(**{"num_kv_blocks": 300, "max_model_len": 512, "max_num_seqs": 8, **options})


@pytest.fixture(scope="module")
def llms() -> Iterator[dict[int, LLM]]:
    """Engines by the number of steps in flight."""
    made = {depth: engine(steps_in_flight=depth) for depth in (1, 2, 3)}
    yield made
    for llm in made.values():
        llm.shutdown()


@pytest.fixture
def llm(llms: dict[int, LLM]) -> LLM:
    return llms[2]


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def run(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [c.token_ids for output in outputs for c in output.outputs]


def check(output: RequestOutput, schema: Any) -> None:
    for completion in output.outputs:
        assert completion.finish_reason == "stop", completion.text
        jsonschema.validate(
            json.loads(completion.text), schema, format_checker=jsonschema.FormatChecker()
        )


@pytest.mark.parametrize("depth", [1, slow(2), slow(3)])
def test_outputs_are_valid(llms: dict[int, LLM], depth: int) -> None:
    params = [asks(SCHEMAS[i % 2], seed=i, n=2) for i in range(6)]
    prompts = [PROMPTS[i % 4] for i in range(6)]
    for i, output in enumerate(llms[depth].generate(prompts, params, use_tqdm=False)):
        check(output, SCHEMAS[i % 2])


ALONE: dict[tuple[str, str], list[int]] = {}
"""Tokens of requests that have run alone."""


def tokens_alone(llm: LLM, prompt: str, params: SamplingParams) -> list[int]:
    key = prompt, repr(params)
    if key not in ALONE:
        (ALONE[key],) = run(llm, [prompt], [params])
    return ALONE[key]


@settings(max_examples=examples(12), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_batch_gives_the_tokens_of_each_request_alone(llms: dict[int, LLM], data: Any) -> None:
    """The tokens are the same with and without other requests and grammars, for any number of steps
    in flight."""
    jobs = []
    for _ in range(data.draw(st.integers(2, 5))):
        prompt, seed = data.draw(st.sampled_from(PROMPTS)), data.draw(st.integers(0, 9))
        if data.draw(st.booleans()):
            params = asks(data.draw(st.sampled_from(SCHEMAS)), seed=seed)
        else:
            params = SamplingParams(max_tokens=20, temperature=0.9, seed=seed, ignore_eos=True)
        jobs.append((prompt, params))
    prompts, params = [job[0] for job in jobs], [job[1] for job in jobs]
    alone = [tokens_alone(llms[1], prompt, p) for prompt, p in jobs]
    assert run(llms[data.draw(st.integers(1, 3))], prompts, params) == alone


@pytest.mark.parametrize("depth", [slow(1), slow(2), 3])
def test_preemption_and_chunked_prompts(llms: dict[int, LLM], depth: int) -> None:
    prompts = [PROMPTS[i % 4] * 6 for i in range(6)]
    params = [asks(SCHEMAS[i % 2], seed=i) if i != 3 else PLAIN[0] for i in range(6)]
    expected = run(llms[1], prompts, params)
    small = engine(
        num_kv_blocks=14, max_model_len=180, steps_in_flight=depth, max_num_batched_tokens=24
    )
    assert run(small, prompts, params) == expected
    assert small.stats().preemptions > 0
    small.shutdown()


def test_prefix_cache(llm: LLM) -> None:
    prompt = "A long prompt that is known already. " * 4
    first = llm.generate(prompt, asks(PERSON), use_tqdm=False)[0]
    again = llm.generate(prompt, asks(PERSON), use_tqdm=False)[0]
    assert again.num_cached_tokens > 0
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_kinds(llm: LLM) -> None:
    asked = [
        structured(choice=("red", 'q"\\é\n', "")),
        structured(regex=r"[a-c]{2}-\d+"),
        structured(grammar='start: "x" %json {"type": "integer", "maximum": 9, "minimum": 5}'),
        structured(grammar='root ::= "yes" | "no" root'),
        structured(json_object=True),
    ]
    params = [SamplingParams(structured_outputs=s, max_tokens=60, seed=5) for s in asked]
    choice, regex, lark, gbnf, obj = texts(llm.generate(["Say:"] * 5, params, use_tqdm=False))
    assert choice in ("red", 'q"\\é\n', "")
    assert regex[:2].strip("abc") == ""
    assert regex[2] == "-"
    assert lark[0] == "x"
    assert 5 <= int(lark[1:]) <= 9
    assert gbnf.replace("no", "") in ("yes", "", "n")  # the last if it was cut
    assert obj.startswith("{")


def test_chat(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "Who are you?"}], asks(PERSON), use_tqdm=False)
    check(output[0], PERSON)


def test_ends(llm: LLM) -> None:
    """The grammar says when the text may end, and when it must."""

    def one(pattern: str, **options: Any) -> Any:
        params = SamplingParams(structured_outputs=structured(regex=pattern), seed=3, **options)
        return llm.generate("Count:", params, use_tqdm=False)[0].outputs[0]

    cut = one("a{500}", max_tokens=7)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 7)
    complete = one("abc", ignore_eos=True, min_tokens=30, max_tokens=60)
    assert (complete.text, complete.finish_reason) == ("abc", "stop")
    assert one("(a|b)*", ignore_eos=True, max_tokens=25).finish_reason == "length"
    assert len(one("[ab]*", min_tokens=9, max_tokens=40).token_ids) >= 10
    letters = [llm.get_tokenizer().encode(x, add_special_tokens=False).item() for x in "ab"]
    for ignored in (False, True):
        ends = {"ignore_eos": ignored, "stop_token_ids": letters, "max_tokens": 12}
        assert len(one("[ab]", **ends).token_ids) == 1
        assert len(one("[abcd]*", min_tokens=6, **ends).token_ids) > 6
    assert one("a{9}b", stop=["aaa"], max_tokens=40).text == ""
    bias = one("[ab]{3}", logit_bias=dict.fromkeys(range(300, 320), 100.0), max_tokens=20)
    assert bias.text.strip("ab") == ""
    assert one("[0-9]{4}", logprobs=2, presence_penalty=1.5, max_tokens=20).logprobs is not None


def test_a_schema_that_cannot_be_enforced_is_refused(llm: LLM) -> None:
    bad = asks({"type": "object", "properties": {"a": {"if": {}}}})
    with pytest.raises(GrammarError, match="#/properties/a/if") as caught:
        llm.generate(PROMPTS[:2], [PLAIN[0], bad], use_tqdm=False)
    assert caught.value.param == "structured_outputs"
    for params in (structured(regex="("), structured(grammar="start: x"), structured(json="{"),
                   structured(grammar="a ::= ("), structured(regex=r"a\b")):  # fmt: skip
        with pytest.raises(GrammarError):
            llm.generate("a", SamplingParams(structured_outputs=params), use_tqdm=False)
    # The request beside it has ended too.
    stats = llm.stats()
    assert not stats.running
    assert not any(stats.blocks_used)


def test_remembered_masks_leave_texts_as_they_are(llm: LLM) -> None:
    """Greedy and sampled, the first time and the third, beside a memory of nothing."""
    link = {"type": "string", "pattern": "^https?://[a-z./]{3,90}$"}
    note = {"type": "string", "maxLength": 30}
    call = {"type": "object", "properties": {"link": link, "note": note},
            "required": ["link", "note"], "additionalProperties": False}  # fmt: skip
    schema = {"type": "array", "items": call, "minItems": 50}
    params = [asks(schema, seed=i, temperature=i % 2, max_tokens=60) for i in range(4)]
    bare = engine(structured_outputs_memory_mb=0)
    expected = run(bare, PROMPTS, params)
    assert bare.stats().grammars.mask_lookups == 0
    bare.shutdown()
    before = llm.stats().grammars.mask_hits
    for _ in range(3):
        assert run(llm, PROMPTS, params) == expected
    assert llm.stats().grammars.mask_hits > before


def test_exactly_one_kind() -> None:
    for options in ({}, {"regex": "a", "json_object": True}, {"choice": ("a",), "grammar": "a"}):
        with pytest.raises(RequestError, match="exactly one"):
            structured(**options)


# -- the engine's core, where the caller has not checked ---------------------------------------


def core_of(llm: LLM) -> EngineCore:
    return llm._core


def add(llm: LLM, name: str, params: SamplingParams) -> Any:
    prompt = llm.get_tokenizer().encode("Once upon a time")
    return core_of(llm).add(name, prompt, params, max_total=len(prompt) + (params.max_tokens or 9))


def finish(llm: LLM) -> None:
    while core_of(llm).has_work():
        core_of(llm).step()


def test_a_grammar_that_fails_in_the_engine_fails_its_request_only(llm: LLM) -> None:
    expected = tokens_alone(llm, PROMPTS[0], PLAIN[1])
    (bad,) = add(llm, "bad", asks({"if": {}}))
    (good,) = add(llm, "good", PLAIN[1])
    finish(llm)
    ((failed, error),) = core_of(llm).take_failures()
    assert failed is bad
    assert str(bad.finish_reason) == "error"
    assert isinstance(error, GrammarError)
    assert good.output.tolist() == expected
    assert core_of(llm).take_failures() == []


def test_a_grammar_that_takes_too_long(llms: dict[int, LLM], monkeypatch: Any) -> None:
    llm = engine(structured_outputs_timeout=0.02)
    gate = threading.Event()
    monkeypatch.setattr(
        Compiler,
        "_compiled_now",
        lambda *_: gate.wait(20) and None,  # type: ignore[func-returns-value]
    )
    with pytest.raises(GrammarError, match="longer than") as caught:
        llm.generate("a", asks(PERSON), use_tqdm=False)
    assert caught.value.code == "grammar_timeout"
    (late,) = add(llm, "late", asks(PERSON))
    (plain,) = add(llm, "plain", PLAIN[0])
    finish(llm)
    gate.set()
    assert [request for request, _ in core_of(llm).take_failures()] == [late]
    assert len(plain.output) == 24
    llm.shutdown()


@pytest.mark.parametrize(("panics", "most"), [(False, 120), (True, 120), (False, 4)])
def test_a_walk_that_fails_ends_its_request(
    llm: LLM, monkeypatch: Any, panics: bool, most: int
) -> None:
    """No token is generated without a mask, not even the last one."""
    build, count = MaskBuilder.build, 0

    def failing(self: MaskBuilder, rows: list[MaskRow], *others: Any) -> None:
        nonlocal count
        count += 1
        if count == 4 and panics:
            raise BaseException("as a panic in native code is")
        if count == 4 and rows[0].state is not None:
            rows[0].state.error = GrammarError("too complex")
        build(self, rows, *others)

    asked = [asks(PERSON, max_tokens=most), PLAIN[0]]
    expected = [tokens_alone(llm, *job) for job in zip(PROMPTS[:2], asked, strict=True)]
    monkeypatch.setattr(MaskBuilder, "build", failing)
    broken, whole = llm.generate(PROMPTS[:2], asked, use_tqdm=False)
    assert broken.outputs[0].finish_reason == "error"
    assert broken.finished
    assert broken.outputs[0].token_ids == expected[0][:3]
    assert whole.outputs[0].token_ids == expected[1]
    monkeypatch.undo()
    assert run(llm, PROMPTS[:2], asked) == expected


@pytest.mark.parametrize("depth", [slow(1), slow(2), 3])
def test_abort(llms: dict[int, LLM], depth: int) -> None:
    llm = llms[depth]
    expected = [tokens_alone(llm, PROMPTS[0], asked) for asked in (asks(PERSON), PLAIN[1])]
    for steps in some((0, 1, 2, 3, 5)):
        add(llm, "gone", asks(DATES, n=2))
        (kept,) = add(llm, "kept", asks(PERSON))
        (plain,) = add(llm, "plain", PLAIN[1])
        for _ in range(steps):
            core_of(llm).step()
        core_of(llm).abort("gone")
        finish(llm)
        assert [kept.output.tolist(), plain.output.tolist()] == expected
        assert llm.stats().blocks_used == [0]


def test_steps_are_submitted_after_one_that_waits_for_its_mask(llm: LLM, monkeypatch: Any) -> None:
    """All steps are launched before their masks arrive."""
    submitted: list[StepPlan] = []
    heads: list[tuple[int, int]] = []
    more = threading.Condition()
    executor = core_of(llm)._executor
    submit, build = executor.submit, MaskBuilder.build

    def seen(plan: StepPlan) -> None:
        with more:
            submitted.append(plan)
            more.notify()
        submit(plan)

    def late(self: MaskBuilder, rows: list[MaskRow], *others: Any) -> None:
        with more:  # until one more step than the one that asked is there
            known = len(submitted)
            more.wait_for(lambda: len(submitted) > known, timeout=0.2)
            heads.append((known, len(submitted)))
        build(self, rows, *others)

    asked = [asks(DATES), PLAIN[0]]
    expected = [tokens_alone(llm, *job) for job in zip(PROMPTS[:2], asked, strict=True)]
    monkeypatch.setattr(executor, "submit", seen)
    monkeypatch.setattr(MaskBuilder, "build", late)
    assert run(llm, PROMPTS[:2], asked) == expected
    assert any(newest > waited for waited, newest in heads)
    assert any(plan.num_rows == 2 and plan.gated for plan in submitted)
