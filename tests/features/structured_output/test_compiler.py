"""The compiler's queue: grammars are shared and cancelled with their requests, and errors name the
right grammar."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest

from quire.errors import CompilerBusyError, GrammarError, QuireError
from quire.features.structured_output.compiler import Compiler, CompilerConfig
from quire.sampling_params import StructuredOutputsParams
from quire.server.errors import as_api_error
from quire.text.tokenizer import Tokenizer
from tests.features.structured_output.conftest import EOS, Accepts, of_schema


def choice(word: str) -> StructuredOutputsParams:
    return StructuredOutputsParams(choice=[word])


def wait_in_vain(compiler: Compiler, params: StructuredOutputsParams) -> QuireError:
    """Waits for a grammar until its time is up. Returns the error of its request."""
    with pytest.raises(TimeoutError):
        compiler.compile(params).result(compiler.config.timeout)
    error = compiler.late(params)
    compiler.forget(params)
    return error


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


@pytest.fixture
def compiled() -> list[str]:
    """Returns the compiled grammars, in order."""
    return []


@pytest.fixture
def gated(
    tokenizer: Tokenizer, gate: threading.Event, compiled: list[str], monkeypatch: Any
) -> Iterator[Compiler]:
    """A compiler with one thread, which waits for the gate at grammars with the choice 'slow'."""
    config = CompilerConfig(timeout=0.05, cached=2, threads=1)
    made = Compiler(tokenizer.hub.to_str, tokenizer.vocab_size, EOS, config)
    compile = made._compiled_now

    def compiling(key: bytes, params: StructuredOutputsParams) -> Any:
        (word,) = params.choice or ("",)
        compiled.append(word)
        if word == "slow":
            gate.wait(20)
        return compile(key, params)

    made.warm_up()
    assert made.tokenizer_vocab
    monkeypatch.setattr(made, "_compiled_now", compiling)
    yield made
    gate.set()
    made.shutdown()


@pytest.mark.parametrize(
    "choices",
    [
        [f"label number {i}" for i in range(10_000)],
        ["a", "ab", "abc", 'quote "', "back\\slash", "new\nline", "/re(g)+ex|/", "é 日本 😀"],
        ["", "yes", "no"],
        [""],
        ["same", "same"],
    ],
    ids=["many", "special", "empty", "only empty", "twice"],
)
def test_choices(accepts: Accepts, choices: list[str]) -> None:
    params = StructuredOutputsParams(choice=choices)
    for choice in {choices[0], choices[-1], *choices[:8]}:
        assert accepts(params, choice)
    for other in ("other", choices[0] + "x", choices[0] + choices[-1], choices[-1][:-1] + "~"):
        assert other in choices or not accepts(params, other)


def test_an_abandoned_grammar_is_not_compiled(
    gated: Compiler, gate: threading.Event, compiled: list[str]
) -> None:
    slow = gated.compile(choice("slow"))
    left = [gated.compile(choice(f"left {i}")) for i in range(20)]
    wanted = gated.compile(choice("wanted"))
    for i in range(20):
        gated.forget(choice(f"left {i}"))
    assert all(each.cancelled() for each in left)
    gate.set()
    wait((slow, wanted), 20)
    assert compiled == ["slow", "wanted"]
    gated.compile(choice("left 3")).result(20)  # no failure was recorded for it
    assert compiled == ["slow", "wanted", "left 3"]


def test_a_thread_that_comes_too_late_leaves_the_next_request_alone(
    gated: Compiler, monkeypatch: Any
) -> None:
    """A thread takes up a grammar in the moment in which it is forgotten, and another request asks
    for it before the thread looks."""
    works: list[Any] = []

    def submit(work: Any, *args: Any) -> Future[Any]:
        works.append(lambda: work(*args))
        return Future()

    monkeypatch.setattr(gated._pool, "submit", submit)
    wanted = choice("wanted")
    gated.compile(wanted)
    gated.forget(wanted)
    again = gated.compile(wanted)
    with pytest.raises(GrammarError, match="Nobody waits"):
        works[0]()
    again.set_result(works[1]())
    assert not gated._jobs
    assert gated.compile(wanted) is again


def test_grammars_are_shared_while_they_wait_and_while_they_run(
    gated: Compiler, gate: threading.Event, compiled: list[str]
) -> None:
    """More grammars than the cache keeps, and one of two waiting requests is aborted."""
    slow = [gated.compile(choice("slow")) for _ in range(3)]
    asked = [[gated.compile(choice(str(i))) for _ in range(2)] for i in range(5)]
    for i in range(5):
        gated.forget(choice(str(i)))
    gated.forget(choice("slow"))
    assert len(set(slow)) == 1
    gate.set()
    for first, second in asked:
        assert first is second
        first.result(20)
    assert compiled == ["slow", *"01234"]


def test_the_error_names_the_slow_grammar(gated: Compiler, gate: threading.Event) -> None:
    gated.compile(choice("slow"))
    quick = wait_in_vain(gated, choice("quick"))
    assert isinstance(quick, CompilerBusyError)
    answer = as_api_error(quick)
    assert (answer.status, answer.body.error.code) == (503, "grammars_busy")
    assert "Retry-After" in answer.headers
    assert "took longer than" in str(wait_in_vain(gated, choice("slow")))
    gate.set()


def test_a_slow_grammar_does_not_delay_others(
    gated: Compiler, gate: threading.Event, compiled: list[str]
) -> None:
    assert "took longer than" in str(wait_in_vain(gated, choice("slow")))
    gated.compile(choice("quick")).result(20)  # on the only thread but one
    assert compiled == ["slow", "quick"]
    gate.set()


def test_a_grammar_in_use_is_found_when_others_have_displaced_it(tokenizer: Tokenizer) -> None:
    made = Compiler(tokenizer.hub.to_str, tokenizer.vocab_size, EOS, CompilerConfig(cached=2))
    futures = [made.compile(choice(str(i))) for i in range(5)]
    wait(futures)
    assert [made.compile(choice(str(i))) for i in range(5)] == futures
    made.shutdown()


def test_a_kept_refusal_does_not_hold_its_grammar(tokenizer: Tokenizer) -> None:
    """The frames of a traceback hold the schema's text and everything that was read of it."""
    own = Compiler(tokenizer.hub.to_str, tokenizer.vocab_size, EOS, CompilerConfig(threads=1))
    schema = {"properties": {"a": {"type": "string", "if": {"minLength": 1}}}}
    refused = own.compile(of_schema(schema))
    # Its thread has dealt with the refusal when it takes up another grammar.
    own.compile(StructuredOutputsParams(regex="a")).result()
    refusal = refused.exception()
    assert own.compile(of_schema(schema)) is refused
    assert isinstance(refusal, GrammarError)
    assert refusal.__traceback__ is None
    assert refusal.__context__ is None
    own.shutdown()
