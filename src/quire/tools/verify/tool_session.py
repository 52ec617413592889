"""Requests with tools, and their answers in one form."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError
from quire.tools.verify.outcome import FailedError, NotOfferedError, require
from quire.tools.verify.routes import Json
from quire.tools.verify.session import Session, check_status

MOST_TOKENS = 2048
"""Most tokens of an answer. Models that reason first need many."""
_MARKUP = (
    "<tool_call>", "</tool_call>", "</think>", "<function=", "[TOOL_CALLS]", "<|tool_call|>",
    "<|python_tag|>", "<|channel|>", "<|message|>",
)  # fmt: skip
"""Marks of common formats, which belong neither to content nor to arguments."""


@dataclass(slots=True)
class CheckedCall:
    """A tool call.

    Attributes:
        arguments: JSON text, as the server sent it.
        pieces: number of stream events with a part of the arguments; 1 in a whole answer.
    """

    id: str
    name: str
    arguments: str = ""
    pieces: int = 1

    @property
    def values(self) -> Json:
        """The arguments.

        Raises:
            FailedError: they are not the JSON text of an object.
        """
        try:
            values = json.loads(self.arguments)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise FailedError(
                f"the arguments of {self.name!r} are not a JSON object: {self.arguments[:120]!r}"
            )
        return values


@dataclass(slots=True)
class ToolAnswer:
    """An answer that may have tool calls, whole or assembled from a stream."""

    content: str = ""
    reasoning: str = ""
    calls: list[CheckedCall] = field(default_factory=list)
    finish_reason: str | None = None

    def check(self, names: set[str]) -> None:
        """Checks what holds for every answer.

        Args:
            names: the names of the request's tools.

        Raises:
            FailedError: naming what is wrong.
        """
        ids = [call.id for call in self.calls]
        require(all(ids) and len(set(ids)) == len(ids), f"calls have the ids {ids}")
        for call in self.calls:
            require(call.name in names, f"{call.name!r} is called, which is not a tool")
        leaked = [mark for mark in _MARKUP if mark in self.content]
        require(not leaked, f"{leaked} is in the content: {self.content[:120]!r}")
        require(self.finish_reason is not None, "the answer has no finish_reason")
        if self.finish_reason == "tool_calls":
            require(bool(self.calls), "finish_reason is 'tool_calls', and there are no calls")

    def only_call(self) -> CheckedCall:
        """Returns the only call.

        Raises:
            FailedError: there is none, or several.
            NotOfferedError: the answer ended at the limit before the call.
        """
        if self.finish_reason == "length":
            raise NotOfferedError(f"the answer is longer than {MOST_TOKENS} tokens")
        require(len(self.calls) == 1, f"there are {len(self.calls)} calls, not one")
        return self.calls[0]


class ToolSession:
    """Asks one model with tools, on the chat route.

    Args:
        session: of the chat route.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def body(self, tools: list[Json], prompt: str | list[Json], **fields: Any) -> Json:
        """Returns a request's body.

        Args:
            tools: functions, each with name, parameters and so on.
            prompt: the user's text, or all messages.
        """
        body = self.session.body("", MOST_TOKENS)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        functions = [{"type": "function", "function": tool} for tool in tools]
        return {**body, "messages": messages, "tools": functions, **fields}

    def both(self, body: Json, needs: str = "tools") -> list[ToolAnswer]:
        """Returns the whole answer and the streamed one, both checked."""
        return [self.ask(body, needs), self.stream(body)]

    def ask(self, body: Json, needs: str = "tools") -> ToolAnswer:
        """Returns a whole answer. Raises what `Session.ask` raises."""
        reply = self.session.post(body)
        check_status(reply, needs)
        try:
            answer = _whole(reply.body["choices"][0])
        except (LookupError, TypeError, AttributeError) as error:
            raise FailedError(f"the answer does not have OpenAI's shape: {error!r}") from None
        answer.check(_names(body))
        return answer

    def stream(self, body: Json, needs: str = "tools") -> ToolAnswer:
        """Returns a streamed answer. Raises what `Session.ask` raises."""
        answer = ToolAnswer()
        try:
            for chunk in self.session.chunks({**body, "stream": True}, needs):
                for choice in chunk["choices"]:
                    _add_delta(answer, choice)
        except (ConfigError, OSError, http.client.HTTPException) as error:
            raise FailedError(f"the stream ended early: {error}") from None
        except (LookupError, TypeError, AttributeError) as error:
            raise FailedError(f"a chunk does not have OpenAI's shape: {error!r}") from None
        answer.check(_names(body))
        return answer

    def refused(self, body: Json, name: str) -> None:
        """Requires that the server refuses a body with a 4xx and a message."""
        reply = self.session.post(body)
        require(400 <= reply.status < 500, f"{name} is answered with {reply.status}, not 4xx")
        require(bool(reply.message), f"the {reply.status} for {name} has no error.message")


def _names(body: Json) -> set[str]:
    return {tool["function"]["name"] for tool in body["tools"]}


def _whole(choice: Json) -> ToolAnswer:
    message = choice["message"]
    answer = ToolAnswer(message.get("content") or "", _reasoning(message))
    answer.finish_reason = choice["finish_reason"]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        require(call["type"] == "function", f"a call has the type {call['type']!r}")
        require(isinstance(function["arguments"], str), "a call's arguments are not text")
        answer.calls.append(CheckedCall(call["id"], function["name"], function["arguments"]))
    return answer


def _add_delta(answer: ToolAnswer, choice: Json) -> None:
    require(answer.finish_reason is None, "the stream goes on after its finish_reason")
    delta = choice["delta"]
    answer.content += delta.get("content") or ""
    answer.reasoning += _reasoning(delta)
    for part in delta.get("tool_calls") or ():
        index, function = part["index"], part.get("function") or {}
        if index == len(answer.calls):
            require(bool(part.get("id")), f"call {index} begins without an id")
            require(bool(function.get("name")), f"call {index} begins without a name")
            answer.calls.append(CheckedCall(part["id"], function["name"], "", 0))
        else:
            require(0 <= index < len(answer.calls), f"call {index} comes out of order")
            name, known = function.get("name"), answer.calls[index].name
            require(name in (None, "", known), f"call {index} changes its name to {name!r}")
        text = function.get("arguments") or ""
        answer.calls[index].arguments += text
        answer.calls[index].pieces += bool(text)
    answer.finish_reason = choice.get("finish_reason")


def _reasoning(message: Json) -> str:
    return message.get("reasoning_content") or message.get("reasoning") or ""
