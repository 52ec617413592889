"""Conversations built from items and blocks."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import RequestError
from quire.server.chat.dialogue import ConversationBuilder


def call(id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_an_assistants_consecutive_items_become_one_message() -> None:
    turns = ConversationBuilder("input")
    turns.system("Be brief.")
    turns.system("Be kind.")
    turns.user("Weather?")
    turns.reasoning("Hm.")
    turns.assistant("I will look.")
    turns.call("c1", "look", '{"city": "Oslo"}', "input[4]")
    turns.assistant("And stop.")
    turns.reasoning("So.")
    turns.call("c2", "stop", "{}", "input[7]")
    turns.result("c2", "Stopped.", "input[8]")
    turns.result("c1", "Snow.", "input[9]")
    turns.assistant("It snows.")
    turns.user("Oh.")
    turns.user("Sure?")
    turns.system("Now in French.")
    assert turns.finish() == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I will look.\n\nAnd stop.",
            "reasoning_content": "Hm.\n\nSo.",
            "tool_calls": [call("c1", "look", '{"city": "Oslo"}'), call("c2", "stop")],
        },
        {"role": "tool", "tool_call_id": "c2", "name": "stop", "content": "Stopped."},
        {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "Snow."},
        {"role": "assistant", "content": "It snows."},
        {"role": "user", "content": "Oh."},
        {"role": "user", "content": "Sure?"},
        {"role": "system", "content": "Now in French."},
    ]


def test_turns_of_one_side_can_be_merged() -> None:
    turns = ConversationBuilder("messages")
    turns.user("One.", merge=True)
    turns.user("Two.", merge=True)
    assert turns.finish() == [{"role": "user", "content": "One.\n\nTwo."}]


def test_calls_and_results_belong_together() -> None:
    turns = ConversationBuilder("input")
    with pytest.raises(RequestError, match="not in the conversation") as error:
        turns.result("c", "x", "input[0].call_id")
    assert error.value.param == "input[0].call_id"
    turns.call("c", "look", "{}", "input[1].call_id")
    with pytest.raises(RequestError, match="two calls"):
        turns.call("c", "look", "{}", "input[2].call_id")
    with pytest.raises(RequestError, match="'c' has no result") as error:
        turns.finish()
    assert error.value.param == "input"
    turns.result("c", "x", "input[3].call_id")
    with pytest.raises(RequestError, match="has its result already"):
        turns.result("c", "x", "input[4].call_id")
    assert len(turns.finish()) == 2


@pytest.mark.parametrize("arguments", [" ", "{", "[1]", "1", '{"a": NaN}', '{"city": "Os'])
@pytest.mark.parametrize("answered", [False, True])
def test_calls_that_were_cut_short_are_text(arguments: str, answered: bool) -> None:
    turns = ConversationBuilder("input")
    turns.assistant("I will look.")
    turns.call("c", "look", arguments, "input[0]")
    if answered:
        turns.result("c", "What?", "input[1]")
        with pytest.raises(RequestError, match="has its result already"):
            turns.result("c", "What?", "input[2]")
    first, *rest = turns.finish()
    text = 'I will look.\n\n{"name": "look", "arguments": ' + arguments
    assert first == {"role": "assistant", "content": text}
    assert rest == [
        {"role": "tool", "tool_call_id": "c", "name": "look", "content": "What?"}
    ] * len(rest)
    assert len(rest) == answered
