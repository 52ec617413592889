"""`quire verify --tools` on this server, in several formats of tool calls."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import llguidance
import numpy as np
import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from quire.errors import ConfigError
from quire.grammar.grammar import compilable
from quire.http_client import HttpClient
from quire.sampling_params import SamplingParams, StructuredOutputsParams
from quire.tools.verify.outcome import FailedError
from quire.tools.verify.run import ScoreCard, verify_tools
from quire.tools.verify.tool_checks import TOOL_CHECKS
from quire.tools.verify.tool_session import CheckedCall, ToolSession
from tests.server.fakes import CompletionUpdate
from tests.server.parsers.test_registry import WRITTEN, template_of
from tests.server.scripted import EMBEDDED, Scripted, Speaker, serve

FORMATS = ("hermes", "mistral", "qwen3_xml", "kimi_k3", "minimax_m3", "solar")


class GrammarEngine(Speaker):
    """Writes the first text that a request's grammar allows; without a grammar, "Hello."."""

    def __post_init__(self) -> None:
        super().__post_init__()
        text = (EMBEDDED / "tokenizer.json").read_text("utf-8")
        self.guide = llguidance.LLTokenizer(text)
        lengths = [len(self.tokenizer.token_bytes(id)) for id in range(self.guide.vocab_size)]
        self.lengths = np.array(lengths) + 1

    async def generate(
        self, prompt: Any, params: SamplingParams, *, request_id: str, **_: Any
    ) -> AsyncIterator[CompletionUpdate]:
        most = params.max_tokens or 4096
        ids, complete = self._written(params.structured_outputs, most)
        for choice in range(params.n):
            shown = ""
            for count in range(1, len(ids) + 1):
                await asyncio.sleep(0)
                last = count == len(ids)
                text = self.tokenizer.decode(ids[:count], skip_special_tokens=False)
                if text.endswith("\ufffd") and not last:
                    text = shown
                yield CompletionUpdate(
                    choice,
                    text[len(shown) :],
                    [ids[count - 1]],
                    finish_reason=("stop" if complete else "length") if last else None,
                    prompt_token_ids=list(prompt) if count == 1 else None,
                )
                shown = text

    def _written(
        self, outputs: StructuredOutputsParams | None, most: int
    ) -> tuple[list[int], bool]:
        """Returns the tokens of an answer, and whether it is complete."""
        if outputs is None:
            ids = self.tokenizer.encode("Hello.", add_special_tokens=False).tolist()
            return ids[:most], len(ids) <= most
        matcher = llguidance.LLMatcher(self.guide, compilable(outputs))
        assert not matcher.is_error(), matcher.get_error()
        ids = []
        while len(ids) < most:
            allowed = np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8) > 0
            ids.append(int(np.argmax(allowed * self.lengths)))
            matcher.consume_token(ids[-1])
            if matcher.is_accepting():
                return ids, True
        return ids, False


@pytest.fixture(scope="module", params=FORMATS)
def running(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    engine = GrammarEngine()
    engine.tokenizer.use_template(template_of(WRITTEN[request.param]))
    with serve(engine) as scripted:
        yield scripted


def unlike_passed(card: ScoreCard) -> list[str]:
    return [
        f"{outcome.status}: {outcome.check}: {outcome.detail}"
        for outcome in card.outcomes
        if outcome.status != "passed"
    ]


def test_all_checks_pass(running: Scripted) -> None:
    assert unlike_passed(verify_tools(HttpClient(running.url, timeout=30))) == []


class DeafEngine(GrammarEngine):
    """Ignores grammars."""

    def _written(
        self, outputs: StructuredOutputsParams | None, most: int
    ) -> tuple[list[int], bool]:
        return super()._written(None, most)


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["verify", "--tools", *arguments])


def test_a_server_that_enforces_nothing_fails() -> None:
    engine = DeafEngine()
    engine.tokenizer.use_template(template_of(WRITTEN["hermes"]))
    with serve(engine) as running:
        result = command("--base-url", running.url, "--format", "json")
        table = command(running.url)
    assert (result.exit_code, table.exit_code) == (1, 1)
    card = json.loads(result.stdout)
    found = {check["check"]: check for check in card["checks"]}
    assert card["passed"] + card["failed"] + card["not_offered"] == len(TOOL_CHECKS)
    assert found["none"]["status"] == "passed"
    assert found["required"]["status"] == "failed"
    assert found["required"]["detail"] == "there are 0 calls, not one"
    assert "vllm#24509" in found["required"]["seen_in"]
    assert "there are 0 calls, not one (seen in vllm#24509" in table.stdout


def test_a_right_server_passes_from_the_command_line() -> None:
    engine = GrammarEngine()
    engine.tokenizer.use_template(template_of(WRITTEN["mistral"]))
    with serve(engine) as running:
        result = command(running.url, "--json", "--model", "scripted")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["failed"] == 0


@pytest.mark.parametrize("arguments", [(), ("localhost:1", "--base-url", "localhost:2")])
def test_the_address_is_given_once(arguments: tuple[str, ...]) -> None:
    assert isinstance(command(*arguments).exception, ConfigError)


def _part(index: int, **fields: Any) -> dict[str, Any]:
    return {"delta": {"tool_calls": [{"index": index, **fields}]}}


BEGIN = _part(0, id="a", function={"name": "f", "arguments": "{"})
WRONG_STREAMS: list[tuple[list[dict[str, Any]], str]] = [
    ([_part(1, id="a", function={"name": "f"})], "call 1 comes out of order"),
    ([_part(0, function={"name": "f"})], "call 0 begins without an id"),
    ([_part(0, id="a", function={"arguments": "{"})], "call 0 begins without a name"),
    ([BEGIN, _part(0, function={"name": "g"})], "call 0 changes its name to 'g'"),
    (
        [{"delta": {}, "finish_reason": "stop"}, {"delta": {"content": "x"}}],
        "the stream goes on after its finish_reason",
    ),
    ([BEGIN], "the answer has no finish_reason"),
    ([{"delta": {}, "finish_reason": "tool_calls"}], "there are no calls"),
    ([{"delta": {"content": "<tool_call>{"}, "finish_reason": "stop"}], "is in the content"),
    (
        [_part(0, id="a", function={"name": "g"}), {"delta": {}, "finish_reason": "stop"}],
        "'g' is called, which is not a tool",
    ),
]


@pytest.mark.parametrize(("choices", "why"), WRONG_STREAMS, ids=range(len(WRONG_STREAMS)))
def test_wrong_streams(choices: list[dict[str, Any]], why: str) -> None:
    class Client:
        def chunks(self, body: Any, needs: str) -> Any:
            yield from ({"choices": [choice]} for choice in choices)

    session = ToolSession(Client())  # type: ignore[arg-type]
    body = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    with pytest.raises(FailedError, match=re.escape(why)):
        session.stream(body)


@pytest.mark.parametrize("arguments", ["", "[]", '{"a": ', "null"])
def test_arguments_that_are_not_an_object(arguments: str) -> None:
    with pytest.raises(FailedError, match="are not a JSON object"):
        CheckedCall("a", "f", arguments).values  # noqa: B018
