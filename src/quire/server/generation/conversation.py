"""Conversations for chat templates, built from the smaller parts that other APIs send."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from quire.errors import RequestError

_BETWEEN = "\n\n"


class ConversationBuilder:
    """Builds the messages of a conversation part by part.

    Consecutive thinking, text and calls of the assistant become one message, as does all that the
    system says first.
    """

    def __init__(self, param: str) -> None:
        self.param = param
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        self._open: dict[str, str] = {}
        self._cut: set[str] = set()
        """Calls without whole arguments, which may have results and need none."""

    def system(self, text: str) -> None:
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += _BETWEEN + text
        else:
            self.messages.append({"role": "system", "content": text})

    def user(self, text: str, *, merge: bool = False) -> None:
        """Adds a user's text; `merge` appends it to the last message if that is the user's too."""
        if merge and self._last == "user":
            self.messages[-1]["content"] += _BETWEEN + text
        else:
            self.messages.append({"role": "user", "content": text})

    def reasoning(self, text: str) -> None:
        self._add("reasoning_content", text)

    def assistant(self, text: str) -> None:
        self._add("content", text)

    def call(self, id: str, name: str, arguments: str, param: str) -> None:
        """Adds a tool call. `arguments`: the text of a JSON object; empty is one without members.

        A call with other arguments becomes text: an answer that was cut short had no more of it.
        """
        arguments = arguments or "{}"
        if id in self._names:
            raise RequestError(f"'{param}': there are two calls with the id '{id}'.", param=param)
        self._names[id] = self._open[id] = name
        if not is_object(arguments):
            self._open.pop(id)
            self._cut.add(id)
            self.assistant(call_text(name, arguments))
            return
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def result(self, id: str, text: str, param: str) -> None:
        if id in self._cut:
            self._cut.remove(id)
            self._open[id] = self._names[id]
        if id not in self._open:
            what = "has its result already" if id in self._names else "is not in the conversation"
            raise RequestError(f"'{param}': the call '{id}' {what}.", param=param)
        name = self._open.pop(id)
        self.messages.append({"role": "tool", "tool_call_id": id, "name": name, "content": text})

    def finish(self) -> list[dict[str, Any]]:
        for id in self._open:
            raise RequestError(
                f"the call '{id}' has no result in '{self.param}'.", param=self.param
            )
        return self.messages

    @property
    def _last(self) -> str | None:
        return self.messages[-1]["role"] if self.messages else None

    def _assistant(self) -> dict[str, Any]:
        if self._last != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _add(self, name: str, text: str) -> None:
        message = self._assistant()
        before = message.get(name)
        message[name] = before + _BETWEEN + text if before and text else (before or "") + text


def call_text(name: str, arguments: str) -> str:
    """Returns a call as text, for arguments that are not the text of a JSON object."""
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}'


def is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
