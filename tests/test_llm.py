"""`LLM` as users call it, on the embedded model."""

from __future__ import annotations

import gc
import itertools
import signal
from collections.abc import Iterator

import msgspec
import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import ConfigError, EngineDeadError, PromptTooLongError, RequestError
from quire.models import resolve_model_path

SETTINGS = {"device": "cpu", "kv_cache_gb": 0.1, "max_num_seqs": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM(**SETTINGS)
    yield engine
    assert engine.stats().blocks_used == [0]
    engine.shutdown()
    engine.shutdown()


def test_prompts_in_every_form_give_the_same(llm: LLM) -> None:
    text = "Once upon a time"
    ids = llm.get_tokenizer().encode(text).tolist()
    forms = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids and output.finished for output in outputs)
    assert llm.generate(text, GREEDY)[0].outputs[0].text == outputs[0].outputs[0].text
    assert llm.generate(ids, GREEDY)[0].outputs[0].text == outputs[0].outputs[0].text


def test_greedy_equals_transformers(llm: LLM) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        resolve_model_path(None), dtype=torch.float32
    )
    prompts = ["Once upon a time", "The little dog", "hello"]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        ids = torch.tensor([llm.get_tokenizer().encode(prompt).tolist()])
        want = oracle.generate(ids, do_sample=False, max_new_tokens=48, eos_token_id=-1)
        assert output.outputs[0].token_ids == want[0, ids.shape[1] :].tolist()


def test_chat_shows_tools(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    turns = [{"role": "user", "content": "Hello!"}]
    output = llm.chat(turns, SamplingParams(max_tokens=1), tools=[tool])[0]
    assert '"name": "weather"' in (output.prompt or "")


def test_chat_ends_its_turn(llm: LLM) -> None:
    turns = [{"role": "user", "content": "Hello!"}]
    params = SamplingParams(temperature=0.0, max_tokens=100)
    one = llm.chat(turns, params)[0].outputs[0]
    assert one.finish_reason == "stop"
    assert one.text
    assert "<|im_end|>" not in one.text
    assert [o.outputs[0].text for o in llm.chat([turns, turns], params)] == [one.text] * 2


def test_sampling_is_reproducible_and_forks_differ(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=20, ignore_eos=True)
    first, again = (llm.generate("Once", params)[0] for _ in range(2))
    texts = [output.text for output in first.outputs]
    assert texts == [output.text for output in again.outputs]
    assert [output.index for output in first.outputs] == [0, 1, 2]
    assert len(set(texts)) == 3
    other = llm.generate("Once", SamplingParams(seed=8, max_tokens=20, ignore_eos=True))
    assert other[0].outputs[0].text not in texts


def test_stops_logprobs_and_mixed_parameters(llm: LLM) -> None:
    outputs = llm.generate(
        ["Once upon a time", "Once upon a time", "Once upon a time"],
        [
            SamplingParams(temperature=0.0, max_tokens=30, stop=("there",)),
            SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=0),
            SamplingParams(temperature=0.0, max_tokens=7, detokenize=False, ignore_eos=True),
        ],
    )
    stopped, scored, silent = (output.outputs[0] for output in outputs)
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "there")
    assert "there" not in stopped.text
    assert len(scored.logprobs or ()) == 5
    for token, entry in zip(scored.token_ids, scored.logprobs or (), strict=True):
        assert entry[token].rank == 1
        assert len(entry) == 2
        assert entry[token].logprob <= 0
    prompt = outputs[1].prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    assert len(prompt) == len(outputs[1].prompt_token_ids)
    assert (silent.text, len(silent.token_ids)) == ("", 7)


@pytest.mark.parametrize(
    ("prompts", "error", "what"),
    [
        ([[]], RequestError, "empty"),
        ([[1, -1]], RequestError, "vocabulary"),
        ([[1, 10**9]], RequestError, "vocabulary"),
        ([[1.5]], RequestError, "integers"),
        ([{"promt": "x"}], RequestError, "promt"),
        ([[5] * 3000], PromptTooLongError, r"3000.*2048"),
    ],
)
def test_bad_prompts_raise_before_anything_runs(
    llm: LLM, prompts: list[object], error: type[Exception], what: str
) -> None:
    steps = llm.stats().steps
    with pytest.raises(error, match=what):
        llm.generate(["fine", *prompts], GREEDY)  # type: ignore[list-item]
    assert llm.stats().steps == steps


def test_as_many_tokens_as_there_is_room_for(llm: LLM) -> None:
    """`min_tokens` may be any number, but the context's length still ends the text."""
    room = llm.config.scheduler.max_model_len
    ids = [5] * (room - 3)
    params = SamplingParams(temperature=0.0, min_tokens=2**31 - 1, max_tokens=None)
    (done,) = llm.generate([ids], params)[0].outputs
    assert (done.finish_reason, len(done.token_ids)) == ("length", 3)


def test_a_stop_string_that_begins_too_early(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16)
    text = llm.generate("Once upon a", params)[0].outputs[0].text
    tokens = [llm.get_tokenizer().token_text(id) for id in llm.generate(
        "Once upon a", params)[0].outputs[0].token_ids]  # fmt: skip
    stop = "".join(tokens[:3]).strip()
    cut = msgspec.structs.replace(params, stop=[stop], min_tokens=2)
    found = llm.generate("Once upon a", cut)[0].outputs[0]
    assert (found.finish_reason, found.stop_reason, len(found.token_ids)) == ("stop", stop, 3)
    assert found.text == text[: text.index(stop)]


@pytest.mark.parametrize("ids", [[-(2**32) + 5, 7], [2**40, 7], [-1, 7]])
def test_invalid_ids_are_refused(llm: LLM, ids: list[int]) -> None:
    with pytest.raises(RequestError, match="token id"):
        llm.generate([ids], GREEDY)


def test_a_priority_out_of_range_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="priority"):
        llm.generate("a", GREEDY, priority=[10**400])


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "self", "eos_token"])
def test_template_arguments_that_quire_sets_are_refused(llm: LLM, name: str) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, chat_template_kwargs={name: 1})


def test_counts_must_agree(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling parameters"):
        llm.generate(["a"], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="priority has 2 entries for 1 prompts"):
        llm.generate(["a"], GREEDY, priority=[1, 2])


@pytest.mark.parametrize("place", ["plan", "submit", "collect", "update"])
def test_an_interrupt_leaves_the_engine_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A real interrupt, at any point of a step."""
    core = llm._core
    owner = core.scheduler if place in ("plan", "update") else core._executor
    work, calls = getattr(owner, place), itertools.count()

    def interrupted(*arguments: object) -> object:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return work(*arguments)

    handler = signal.default_int_handler
    # Tests that run in the background may have inherited that SIGINT is ignored.
    before = signal.signal(signal.SIGINT, handler)
    with monkeypatch.context() as patch:
        patch.setattr(owner, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], SamplingParams(max_tokens=500, ignore_eos=True))
    # It arrived between two steps, and the steps in flight are gone.
    assert next(calls) >= 4
    assert signal.signal(signal.SIGINT, before) is handler
    assert (llm.stats().running, llm.stats().blocks_used) == (0, [0])
    assert llm.generate("Once", GREEDY)[0].finished


def test_a_step_that_fails_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(**SETTINGS)  # type: ignore[arg-type]

    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(llm._core._executor, "collect", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(["a", "b"], GREEDY)
    with pytest.raises(EngineDeadError, match="earlier step"):
        llm.generate("a", GREEDY)
    llm.stats()
    llm.shutdown()


def test_arrays_of_token_ids(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Once upon a time")
    want = llm.generate(ids.tolist(), GREEDY)[0].outputs[0].token_ids
    for prompts in (ids, [ids], list(ids), ids[None], [{"prompt_token_ids": ids}]):
        (output,) = llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
        assert output.outputs[0].token_ids == want
        assert output.prompt_token_ids == ids.tolist()


def test_times_and_counts(llm: LLM) -> None:
    before = llm.stats()
    params = SamplingParams(n=2, max_tokens=5, ignore_eos=True)
    outputs = llm.generate([[5, 6, 7], [8, 9]], params)
    after = llm.stats()
    assert after.prompt_tokens - before.prompt_tokens == 5
    assert after.generation_tokens - before.generation_tokens == 20
    for output in outputs:
        times = output.metrics
        assert times is not None
        moments = [times.arrival, times.first_scheduled, times.first_token, times.finished]
        assert None not in moments
        assert moments == sorted(moments)  # type: ignore[type-var]
        assert times.queued >= 0


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="known are"):
        LLM(max_seqs=3)
    with pytest.raises(ConfigError, match="over 16 ranks; the model allows 2, 4, 8"):
        LLM(device="cpu", tensor_parallel_size=16)
    for device in ("tpu", "cpu:7", "meta"):
        with pytest.raises(ConfigError, match="device"):
            LLM(device=device)


def test_without_a_tokenizer() -> None:
    llm = LLM(**SETTINGS, skip_tokenizer_init=True)  # type: ignore[arg-type]
    output = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].text == ""
    for call in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user"}])):
        with pytest.raises(RequestError, match="tokenizer"):
            call()
    llm.shutdown()


def test_two_engines_at_once(llm: LLM) -> None:
    prompts = ["Once upon a time", "The fox"]
    expected = [output.outputs[0].text for output in llm.generate(prompts, GREEDY)]
    other = LLM(**SETTINGS)
    for prompt, text in zip(prompts, expected, strict=True):
        for engine in (other, llm):
            assert engine.generate(prompt, GREEDY)[0].outputs[0].text == text
    other.shutdown()
    assert llm.generate(prompts[0], GREEDY)[0].outputs[0].text == expected[0]


def test_an_engine_that_goes_out_of_scope_gives_its_ranks_up(llm: LLM) -> None:
    prompt = "Once upon a time"
    settings = {**SETTINGS, "tensor_parallel_size": 2}
    first = LLM(**settings)
    expected = first.generate(prompt, GREEDY)[0].outputs[0].token_ids
    # The process has one group of ranks: a second one is refused, and the first one keeps working.
    with pytest.raises(ConfigError, match="has already joined a group of ranks"):
        LLM(**settings)
    assert first.generate(prompt, GREEDY)[0].outputs[0].token_ids == expected
    del first
    gc.collect()
    second = LLM(**settings)
    assert second.generate(prompt, GREEDY)[0].outputs[0].token_ids == expected
    second.shutdown()
    second.shutdown()
