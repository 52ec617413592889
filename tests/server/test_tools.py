"""Tool calls and reasoning through the `openai` client, with an engine of scripted answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.errors import ConfigError
from quire.server.app import build_app
from quire.server.args import ServerArgs
from tests.server.fakes import FakeClient
from tests.server.scripted import MODEL, Scripted, scripted_engine, serve

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ASK: list[Any] = [{"role": "user", "content": "How is the weather?"}]


def pieces(text: str, size: int = 3) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def ask(server: Scripted, **options: Any) -> Any:
    arguments = {"model": MODEL, "messages": ASK, "tools": [WEATHER, NOW], **options}
    return server.openai().chat.completions.create(**arguments)


def gathered(chunks: Any) -> dict[str, Any]:
    """Merges a stream's deltas as clients do."""
    out: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        for choice in chunk.choices:
            out["content"] += choice.delta.content or ""
            out["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            out["finish"] = choice.finish_reason or out["finish"]
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(out["calls"])
                    assert call.type == "function"
                    out["calls"].append([call.function.name, ""])
                out["calls"][call.index][1] += call.function.arguments
    return out


def prompt_of(engine: FakeClient) -> str:
    ids, _ = engine.seen[-1]
    return str(engine.tokenizer.decode(ids, skip_special_tokens=False))


def test_calls() -> None:
    second = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    with serve(scripted_engine(*pieces(f"I look.\n\n{OSLO}\n{second}"))) as server:
        choice = ask(server).choices[0]
        streamed = gathered(ask(server, stream=True))
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("weather", '{"city": "Oslo"}'), ("now", "{}")]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert all(call.type == "function" for call in choice.message.tool_calls)
    assert streamed["content"] == "I look."
    assert [tuple(call) for call in streamed["calls"]] == calls
    assert streamed["finish"] == "tool_calls"


def test_arguments_come_as_they_are_made() -> None:
    """The engine continues only once the beginning of the arguments was sent."""
    engine = scripted_engine(*pieces(OSLO), free=18)
    body = {"messages": ASK, "tools": [WEATHER], "stream": True}
    written: list[bytes] = []

    async def receive() -> Any:
        if not written:
            written.append(b"")
            return {"type": "http.request", "body": json.dumps(body).encode()}
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        written.append(message.get("body", b""))
        if b'"arguments":"{' in message.get("body", b""):
            engine.gate.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    args = ServerArgs(generation_config="none")
    app = build_app(engine, args)  # type: ignore[arg-type]
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    assert engine.gate.is_set()
    assert b'"finish_reason":"tool_calls"' in b"".join(written)


def test_an_answer_of_calls_alone_has_no_content() -> None:
    with serve(scripted_engine(*pieces(OSLO))) as server:
        message = ask(server).choices[0].message
    assert message.content is None
    assert len(message.tool_calls) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Just text.",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>{broken}</tool_call>",
        "a < b <tool",
    ],
)
def test_text_that_is_not_a_call_is_content(text: str) -> None:
    with serve(scripted_engine(*pieces(text))) as server:
        choice = ask(server).choices[0]
        streamed = gathered(ask(server, stream=True))
    assert choice.message.content == text == streamed["content"]
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop" == streamed["finish"]


def test_a_call_that_breaks_leaves_the_rest_as_content() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call>'
    with serve(scripted_engine(*pieces(text))) as server:
        choice = ask(server).choices[0]
    assert choice.message.content == "Oslo}}</tool_call>"
    assert choice.message.tool_calls[0].function.arguments == '{"city": '
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_a_time(stream: bool) -> None:
    with serve(scripted_engine(*pieces(f"{OSLO}\n{OSLO}"))) as server:
        answer = ask(server, parallel_tool_calls=False, stream=stream)
        calls = gathered(answer)["calls"] if stream else answer.choices[0].message.tool_calls
    assert len(calls) == 1


def test_choices_become_grammars() -> None:
    engine = scripted_engine(*pieces(OSLO))
    named = {"type": "function", "function": {"name": "weather"}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [named]},
    }
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with serve(engine) as server:
        grammars = []
        for options in (
            {},
            {"tool_choice": "auto"},
            {"tool_choice": "required"},
            {"tool_choice": named},
            {"tool_choice": allowed},
            {"tools": [strict]},
        ):
            ask(server, **options)
            structured = engine.seen[-1][1].structured_outputs
            grammars.append(None if structured is None else structured.grammar)
    assert grammars[:2] == [None, None]
    assert all(grammar and "weather" in grammar for grammar in grammars[2:])
    assert ["now" in grammar for grammar in grammars[2:]] == [True, False, False, False]


def test_none_shows_no_tools_and_reads_no_calls() -> None:
    engine = scripted_engine(*pieces(OSLO))
    with serve(engine) as server:
        message = ask(server, tool_choice="none").choices[0].message
        assert "weather" not in prompt_of(engine).replace("How is the weather?", "")
        ask(server)
        assert '"name": "weather"' in prompt_of(engine)
    assert message.content == OSLO
    assert message.tool_calls is None


def test_calls_and_results_go_back_to_the_model() -> None:
    engine = scripted_engine("Grey.")
    with serve(engine) as server:
        calls = [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
            },
            {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ]
        ask(
            server,
            messages=[
                *ASK,
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": "c1", "content": "grey"},
                {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "8"}]},
            ],
        )
        prompt = prompt_of(engine)
    assert f"<|im_start|>assistant\n{OSLO}\n<tool_call>" in prompt
    assert '{"name": "now", "arguments": {}}' in prompt
    assert "<|im_start|>tool\ngrey<|im_end|>\n<|im_start|>tool\n8<|im_end|>" in prompt


def test_cut_off_calls_are_sent_back_as_text() -> None:
    """A call without the end of its arguments, and a result whose call was trimmed."""
    engine = scripted_engine("Grey.")
    cut = {"name": "weather", "arguments": '{"city": "Os'}
    messages = [
        {"role": "tool", "tool_call_id": "c0", "content": "trimmed"},
        *ASK,
        {
            "role": "assistant",
            "content": "Wait.",
            "tool_calls": [{"id": "c1", "type": "function", "function": cut}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "not JSON"},
        {"role": "assistant", "function_call": cut},
    ]
    with serve(engine) as server:
        ask(server, messages=messages)
        prompt = prompt_of(engine)
    text = '{"name": "weather", "arguments": {"city": "Os<|im_end|>'
    assert f"<|im_start|>assistant\nWait.\n\n{text}\n<|im_start|>tool\nnot JSON" in prompt
    assert f"<|im_start|>assistant\n{text}" in prompt
    assert "<|im_start|>tool\ntrimmed" in prompt


@pytest.mark.parametrize("cut", ["<tool_call>", '<tool_call>\n{"name": "wea', OSLO[:30], OSLO[:-4]])
def test_a_call_that_is_cut_shows_no_markup(cut: str) -> None:
    with serve(scripted_engine(*pieces(f"Well. {cut}"))) as server:
        choice = ask(server).choices[0]
    assert choice.message.content == "Well."
    called = choice.message.tool_calls or []
    assert [call.function.name for call in called] == ["weather"] * (cut == OSLO[:-4])


def test_the_clients_own_stream_reader() -> None:
    with (
        serve(scripted_engine(*pieces(f"Well. {OSLO}"))) as server,
        server.openai().chat.completions.stream(
            model=MODEL, messages=ASK, tools=[WEATHER]
        ) as stream,
    ):
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    call = final.choices[0].message.tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{**NOW, "type": "web_search"}]}, "tools[0]"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "null"}}}
                ]
            },
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]},
         "tools[0].function.x"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"messages": [*ASK, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]},
         "messages[0].reasoning_content"),
        ({"extra_body": {"documents": [{"text": "x"}]}}, "documents"),
    ],
)  # fmt: skip
def test_errors_name_the_field(options: dict[str, Any], param: str) -> None:
    engine = scripted_engine("x")
    with serve(engine) as server, pytest.raises(openai.BadRequestError) as error:
        ask(server, **options)
    assert error.value.param == param
    assert param.rpartition(".")[2].rpartition("]")[2] in str(error.value)
    assert engine.seen == []


def test_models_without_tools(tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    unknown = ServerArgs(generation_config="none", chat_template=str(template))
    with serve(scripted_engine("x"), unknown) as server:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            ask(server)
        assert ask(server, tool_choice="none").choices[0].message.content == "x"
    hidden = ServerArgs(
        generation_config="none", chat_template=str(template), tool_call_parser="hermes"
    )
    with serve(scripted_engine("x"), hidden) as server:
        with pytest.raises(openai.BadRequestError, match="does not show tools"):
            ask(server)
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        with pytest.raises(openai.BadRequestError, match="does not show tool calls"):
            ask(server, tools=[], messages=[*ASK, {"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("parser", ["auto", "kimi_k2"])
def test_a_template_that_changes_lists(tmp_path: Path, parser: str) -> None:
    file = tmp_path / "appends.jinja"
    file.write_text(
        "{% set all = namespace(tools=[]) %}"
        "{% for tool in tools or [] %}{% set _ = all.tools.append(tool) %}{% endfor %}"
        "{{ all.tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    args = ServerArgs(
        generation_config="none", chat_template=str(file), tool_call_parser=parser
    )  # fmt: skip
    with serve(scripted_engine("x"), args) as server:
        assert ask(server, tools=[]).choices[0].message.content == "x"
        with pytest.raises(openai.BadRequestError, match=r"'append'.*--chat-template") as error:
            ask(server)
    assert "--tool-call-parser" not in str(error.value)


def test_gpt_oss_shows_no_markup() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look.<|end|><|start|>assistant to=now<|channel|>commentary<|message|><|call|>"
        '<|start|>assistant<|channel|>commentary to=functions.nobody<|message|>{"a": 1}<|call|>'
    )
    args = ServerArgs(
        generation_config="none", tool_call_parser="gpt_oss", reasoning_parser="gpt_oss"
    )
    for size in (1, 2, 3, 7, len(text)):
        with serve(scripted_engine(*pieces(text, size)), args) as server:
            whole = ask(server).choices[0]
            streamed = gathered(ask(server, stream=True))
        assert [call.function.name for call in whole.message.tool_calls] == ["now"]
        assert whole.message.content == streamed["content"] == 'I look.\n\n{"a": 1}'
        assert whole.message.reasoning_content == streamed["reasoning"] == "Hm."
        assert streamed["calls"] == [["now", "{}"]]
        assert whole.finish_reason == streamed["finish"] == "tool_calls"


def reasoning_server(*words: str, opens: bool = False, tmp_path: Path | None = None) -> Any:
    args: dict[str, Any] = {"generation_config": "none", "reasoning_parser": "qwen3"}
    if tmp_path is not None:
        file = tmp_path / "thinking.jinja"
        file.write_text(
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{{ '<think>' ~ m.reasoning_content ~ '</think>' if m.reasoning_content }}"
            "{{ m.content }}<|im_end|>\n{% endfor %}"
            "effort {{ reasoning_effort }}<|im_start|>assistant\n"
            f"{'<think>' if opens else ''}"
        )
        args["chat_template"] = str(file)
    return serve(scripted_engine(*words, encode=True), ServerArgs(**args))


THOUGHT = ["<think>", "\nLet", " me", " see", ".\n", "</think>", "\n\n", "Gr", "ey", "."]


def test_reasoning() -> None:
    with reasoning_server(*THOUGHT) as server:
        answer = ask(server, tools=[])
        streamed = gathered(ask(server, tools=[], stream=True))
        options = {"include_usage": True}
        *_, last = ask(server, tools=[], stream=True, stream_options=options)
        hidden = ask(server, tools=[], extra_body={"include_reasoning": False})
        without = gathered(
            ask(server, tools=[], stream=True, extra_body={"include_reasoning": False})
        )
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "Grey.")
    assert (streamed["reasoning"], streamed["content"]) == ("Let me see.", "Grey.")
    tokenizer = server.engine.tokenizer
    block = len(tokenizer.encode("".join(THOUGHT[:6]), False))
    assert answer.usage.completion_tokens > block
    assert answer.usage.completion_tokens_details.reasoning_tokens == block
    assert last.usage.completion_tokens_details.reasoning_tokens == block
    assert not hasattr(hidden.choices[0].message, "reasoning_content")
    assert hidden.choices[0].message.content == "Grey."
    assert hidden.usage.completion_tokens_details.reasoning_tokens == block
    assert (without["reasoning"], without["content"]) == ("", "Grey.")


def test_without_reasoning_there_is_no_count_of_it() -> None:
    with serve(scripted_engine("x")) as server:
        assert ask(server).usage.completion_tokens_details is None


def test_the_template_may_open_the_block(tmp_path: Path) -> None:
    with reasoning_server(*THOUGHT[1:], opens=True, tmp_path=tmp_path) as server:
        message = ask(server, tools=[]).choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me see.", "Grey.")


def test_reasoning_that_never_ends() -> None:
    with reasoning_server("<think>", "hm", " hm") as server:
        answer = ask(server, tools=[])
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm hm", None)
    usage = answer.usage
    assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens


def test_calls_after_reasoning() -> None:
    with reasoning_server("<think>", f"Not {OSLO}", "</think>", *pieces(OSLO)) as server:
        message = ask(server).choices[0].message
        streamed = gathered(ask(server, stream=True))
    assert message.reasoning_content == f"Not {OSLO}"
    assert message.content is None
    assert [call.function.name for call in message.tool_calls] == ["weather"]
    assert streamed["reasoning"] == f"Not {OSLO}"
    assert streamed["calls"] == [["weather", '{"city": "Oslo"}']]


def test_every_token_is_passed_on_once() -> None:
    words: Sequence[str] = [*THOUGHT, *pieces(OSLO)]
    with reasoning_server(*words) as server:
        options = {"logprobs": True, "extra_body": {"return_token_ids": True}}
        choice = ask(server, **options).choices[0]
        chunks = [c.choices[0] for c in ask(server, stream=True, **options) if c.choices]
        tokenizer = server.engine.tokenizer
    ids = [id for word in words for id in tokenizer.encode(word, False).tolist()]
    assert choice.token_ids == ids
    assert len(choice.logprobs.content) == len(ids)
    assert [id for c in chunks for id in getattr(c, "token_ids", None) or ()] == ids
    assert sum(len(c.logprobs.content) for c in chunks if c.logprobs) == len(ids)


def test_effort_and_earlier_reasoning_reach_the_template(tmp_path: Path) -> None:
    with reasoning_server("x", tmp_path=tmp_path) as server:
        before = {"role": "assistant", "content": "Hi", "reasoning_content": "They greet."}
        ask(server, tools=[], messages=[*ASK, before, *ASK], reasoning_effort="low")
        prompt = prompt_of(server.engine)
    assert "effort low" in prompt
    assert "<think>They greet.</think>Hi" in prompt


def test_chat_template_files_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        ServerArgs(chat_template=str(tmp_path / "none.jinja"))
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% if %}")
    with (
        pytest.raises(ConfigError, match="not valid"),
        serve(scripted_engine("x"), ServerArgs(chat_template=str(broken))),
    ):
        pass
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=name):
            ServerArgs(**{name: "guess"})
