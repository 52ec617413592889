"""Hints: ignored with a header, or refused by a strict server; and fields that agents send."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from quire.server.args import ServerArgs
from quire.server.context import hints
from tests.server.scripted import MODEL, Scripted, Speaker, serve

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}]}
MESSAGES: dict[str, Any] = {**CHAT, "max_tokens": 50}
RESPONSES: dict[str, Any] = {"model": MODEL, "input": "Hello."}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
EDITS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
TOOL: dict[str, Any] = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
LOOK: dict[str, Any] = {"type": "function", "name": "look"}

HINTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {"client_metadata": {"a": "b"}}, "client_metadata", ""),
    ("/v1/chat/completions", {"prompt_cache_options": {"mode": "x"}}, "prompt_cache_options", ""),
    ("/v1/chat/completions", {"prompt_cache_retention": "24h"}, "prompt_cache_retention", ""),
    ("/v1/chat/completions", {"provider": {"sort": "price"}}, "provider", ""),
    ("/v1/chat/completions", {"reasoning_effort": "high"}, "reasoning_effort", ""),
    ("/v1/chat/completions", {"service_tier": "flex"}, "service_tier", ""),
    ("/v1/chat/completions", {"transforms": ["middle-out"]}, "transforms", ""),
    ("/v1/chat/completions", {"usage": {"include": True}}, "usage", ""),
    ("/v1/chat/completions", {"verbosity": "low"}, "verbosity", ""),
    ("/v1/chat/completions", {"chat_template_kwargs": {"mood": "glad"}},
     "chat_template_kwargs", "chat_template_kwargs.mood"),
    ("/v1/messages", {"context_management": EDITS}, "context_management", ""),
    ("/v1/messages", {"output_config": {"effort": "high"}}, "output_config.effort", ""),
    ("/v1/messages", {"thinking": {"type": "adaptive", "display": "updates"}},
     "thinking.display", ""),
    ("/v1/messages", {"tools": [{**TOOL, "defer_loading": True}]}, "tools.defer_loading", ""),
    ("/v1/responses", {"client_metadata": {"a": "b"}}, "client_metadata", ""),
    ("/v1/responses", {"context_management": [{"type": "compaction"}]}, "context_management", ""),
    ("/v1/responses", {"prompt_cache_retention": "24h"}, "prompt_cache_retention", ""),
    ("/v1/responses", {"reasoning": {"effort": "high"}}, "reasoning.effort", ""),
    ("/v1/responses", {"reasoning": {"summary": "detailed"}}, "reasoning.summary", ""),
    ("/v1/responses", {"service_tier": "flex"}, "service_tier", ""),
    ("/v1/responses", {"text": {"verbosity": "low"}}, "text.verbosity", ""),
    ("/v1/responses", {"tools": [{"type": "web_search", "external_web_access": False}, LOOK]},
     "tools.web_search", ""),
    ("/v1/responses", {"tools": [{"type": "local_shell"}]}, "tools.local_shell", ""),
    ("/v1/responses", {"input": [{"role": "user", "content": "a", "phase": "commentary"}]},
     "input.phase", ""),
]  # fmt: skip


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    with serve(Speaker()) as running:
        yield running


@pytest.fixture(scope="module")
def strict() -> Iterator[Scripted]:
    with serve(Speaker(), ServerArgs(generation_config="none", strict_fields=True)) as running:
        yield running


def post(server: Scripted, path: str, fields: dict[str, Any], say: str = "Yes.") -> httpx.Response:
    assert isinstance(server.engine, Speaker)
    server.engine.texts[:] = [say]
    return httpx.post(server.url + path, json=BODIES[path] | fields, timeout=30)


@pytest.mark.parametrize(("path", "fields", "name", "shown"), HINTS, ids=range(len(HINTS)))
def test_hints(
    scripted: Scripted,
    strict: Scripted,
    path: str,
    fields: dict[str, Any],
    name: str,
    shown: str,
) -> None:
    answer = post(scripted, path, fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["quire-ignored"] == (shown or name)
    assert post(strict, path, fields).status_code == 400
    metrics = httpx.get(f"{scripted.url}/metrics").text
    assert f'quire_ignored_fields_total{{field="{name}"}}' in metrics


def test_only_hints_are_ignored(scripted: Scripted) -> None:
    for path, fields in (
        ("/v1/chat/completions", {"documents": [{"text": "a"}]}),
        ("/v1/chat/completions", {"modalities": ["audio"]}),
        ("/v1/chat/completions", {"reasoning_effort": "none", "nonsense": 1}),
        ("/v1/messages", {"container": "c"}),
        ("/v1/messages", {"diagnostics": {}}),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("/v1/responses", {"conversation": "c"}),
        ("/v1/responses", {"tools": [{"type": "nonsense"}]}),
        ("/v1/responses",
         {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}),
        ("/v1/responses", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
    ):  # fmt: skip
        assert post(scripted, path, fields).status_code == 400, fields
    assert "quire-ignored" not in post(scripted, "/v1/responses", {}).headers


def test_large_bodies_are_read_with_their_hints(scripted: Scripted) -> None:
    fields = {"client_metadata": {"a": "b" * 100_000}}
    assert post(scripted, "/v1/responses", fields).headers["quire-ignored"] == "client_metadata"


def test_the_log_has_each_hint_once(
    scripted: Scripted, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "_logged", set())
    with caplog.at_level(logging.INFO, "quire.server"):
        for _ in range(2):
            post(scripted, "/v1/responses", {"service_tier": "flex"})
    assert [record.message for record in caplog.records if "hint" in record.message] == [
        "the hint 'service_tier' is ignored; --strict-fields refuses it"
    ]


# -- agents ------------------------------------------------------------------------------------


NAMESPACE = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [LOOK]}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_in_namespaces(scripted: Scripted, stream: bool) -> None:
    engine = scripted.engine
    assert isinstance(engine, Speaker)
    say = '<tool_call>{"name": "mcp__files__look", "arguments": {}}</tool_call>'
    answer = post(scripted, "/v1/responses", {"tools": [NAMESPACE], "stream": stream}, say)
    assert '"name": "mcp__files__look"' in engine.heard[-1]
    if stream:
        events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        found = json.loads(events[-1].removeprefix("data: "))["response"]
    else:
        found = answer.json()
    (call,) = found["output"]
    assert (call["name"], call["namespace"]) == ("look", "mcp__files")
    assert found["tools"][0]["tools"][0]["name"] == "look"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
    for more in (
        {"input": [{"role": "user", "content": "Hello."}, call, result]},
        {"input": [result], "previous_response_id": found["id"]},
    ):
        assert post(scripted, "/v1/responses", {"tools": [NAMESPACE], **more}).status_code == 200
        assert '{"name": "mcp__files__look", "arguments": {}}' in engine.heard[-1]
    choice = {"type": "function", "name": "look", "namespace": "mcp__files"}
    assert post(
        scripted, "/v1/responses", {"tools": [NAMESPACE], "tool_choice": choice}, say
    ).json()["output"][0]["type"] == "function_call"  # fmt: skip
    del choice["namespace"]
    fields = {"tools": [NAMESPACE], "tool_choice": choice}
    assert post(scripted, "/v1/responses", fields).status_code == 400


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=%s;"


def test_the_billing_header_is_not_in_the_prompt(scripted: Scripted, strict: Scripted) -> None:
    engine = scripted.engine
    assert isinstance(engine, Speaker)
    for number in (1, 2):
        blocks = [{"type": "text", "text": text} for text in (BILLING % number, "Be kind.")]
        answer = post(scripted, "/v1/messages", {"system": blocks})
        assert answer.headers["quire-ignored"] == "system.x-anthropic-billing-header"
    assert engine.heard[-1] == engine.heard[-2]
    assert "Be kind." in engine.heard[-1]
    assert post(strict, "/v1/messages", {"system": blocks}).status_code == 200
    assert isinstance(strict.engine, Speaker)
    assert "billing" in strict.engine.heard[-1]


def test_models_in_anthropics_shape() -> None:
    args = ServerArgs(generation_config="none", served_model_name=("a", "b", "c"))
    with serve(Speaker(), args) as server:
        client = server.anthropic()
        assert [model.id for model in client.models.list()] == ["a", "b", "c"]
        first = client.models.list(limit=2)
        assert ([model.id for model in first.data], first.has_more) == (["a", "b"], True)
        assert [model.id for model in client.models.list(limit=1)] == ["a", "b", "c"]
        assert [model.id for model in client.models.list(before_id="c", limit=1).data] == ["b"]
        assert [model.id for model in server.openai().models.list()] == ["a", "b", "c"]
        with pytest.raises(anthropic.BadRequestError, match="after_id"):
            client.models.list(after_id="x")


def test_a_wrong_key_is_not_tried_again() -> None:
    with serve(Speaker(), ServerArgs(generation_config="none", api_key=("k",))) as server:
        for path in ("/v1/messages", "/v1/responses"):
            refused = post(server, path, {})
            assert refused.status_code == 401
            assert refused.headers["x-should-retry"] == "false"
            assert ("invalid x-api-key" in refused.text) == (path == "/v1/messages")


def test_references_to_tools(scripted: Scripted) -> None:
    use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    found = [{"type": "tool_reference", "tool_name": "mcp__files__look"}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": found}
    messages = [
        *CHAT["messages"], {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]  # fmt: skip
    answer = post(scripted, "/v1/messages", {"messages": messages, "tools": [TOOL]})
    assert answer.status_code == 200, answer.text
    assert isinstance(scripted.engine, Speaker)
    assert "mcp__files__look" in scripted.engine.heard[-1]


FIRST_ONLY = """\
{%- for message in messages %}
{%- if message.role == "system" and not loop.first %}{{ raise_exception("first!") }}{% endif %}
{{- message.role }}: {{ message.content }}
{% endfor %}"""
DROPS_LATE = """\
{%- if messages[0].role == "system" %}system: {{ messages[0].content }}
{% endif %}
{%- for message in messages if message.role != "system" %}{{ message.role }}: {{ message.content }}
{% endfor %}"""


@pytest.mark.parametrize("template", [FIRST_ONLY, DROPS_LATE])
def test_system_messages_in_mid_conversation(template: str) -> None:
    engine = Speaker()
    engine.tokenizer.use_template(template)
    said = [
        ("system", "a"), ("user", "b"), ("system", "c"), ("assistant", "d"), ("system", "e"),
        ("user", "f"), ("user", "g"),
    ]  # fmt: skip
    with serve(engine) as server:
        messages = [{"role": role, "content": text} for role, text in said]
        assert post(server, "/v1/chat/completions", {"messages": messages}).status_code == 200
    assert engine.heard[-1].split("\n") == [
        "system: a", "user: b", "", "c", "assistant: d", "user: e", "", "f", "", "g", ""
    ]  # fmt: skip
