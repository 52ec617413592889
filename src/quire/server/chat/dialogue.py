"""Requests, conversations and events that all chat-like routes share."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quire.engine.loop.beam_search import BeamSearchParams
from quire.errors import RequestError
from quire.outputs import Logprob
from quire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Tells whether the model may or must call tools, and which ones.

    names: None allows every tool of the dialogue.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None

    @classmethod
    def named(cls, name: str) -> ToolChoice:
        """Returns the choice that calls this tool, once."""
        return cls("required", (name,))


@dataclass(slots=True, kw_only=True)
class Dialogue:
    """A conversation to be answered.

    Attributes:
        messages: as chat templates take them: role (system, user, assistant, tool), content (text,
            or None beside tool calls), and where they apply name, tool_call_id, reasoning_content
            and tool_calls in OpenAI's shape, with arguments as JSON text.
        params: with n, max_tokens and structured_outputs.
        default_max_tokens: most tokens where `params` names none; None leaves it to the
            context.
        tools: in OpenAI's shape: {"type": "function", "function": {name, description, parameters,
            strict}}.
        parallel_tool_calls: False: one call at most.
        chat_template: replaces the model's own.
        template_kwargs: further variables of the chat template, such as documents.
        add_special_tokens: adds the tokenizer's own special tokens to what the template wrote.
        most_prompt_tokens: tokens of the prompt to keep, the last ones; None keeps all.
        truncation_side: "right" keeps the first ones instead.
        include_reasoning: False leaves reasoning out of the events (it is still generated).
        beams: searches for the likeliest answers instead of sampling them.
        with_tokens: give tokens without text (the end of sequence, say) an event too. Set it where
            token ids or log-probabilities are passed on.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    default_max_tokens: int | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    most_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    include_reasoning: bool = True
    beams: BeamSearchParams | None = None
    with_tokens: bool = False
    request_id: str
    priority: int = 0
    cache_salt: str = ""


# Events. Those of one choice come in this order: reasoning, text and tool calls as the model made
# them, then `Finished`, exactly once. Every token is in one event's `token_ids`, in order; its text
# may be in the next one.


@dataclass(slots=True)
class TextDelta:
    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]


@dataclass(slots=True)
class ReasoningDelta:
    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]


@dataclass(slots=True)
class ToolCallBegin:
    """The start of a tool call. `index` counts the choice's calls from 0."""

    choice: int
    index: int
    id: str
    name: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]


@dataclass(slots=True)
class ToolCallDelta:
    """More of the JSON text of a call's arguments."""

    choice: int
    index: int
    arguments: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]


@dataclass(slots=True)
class Finished:
    """The end of a choice.

    Attributes:
        finish_reason: stop, length, abort, or tool_calls where a call is complete.
        stop_reason: the stop string or stop token id that ended it; None for the end-of-sequence
            token.
    """

    choice: int
    finish_reason: str
    stop_reason: int | str | None = None


Delta = TextDelta | ReasoningDelta | ToolCallBegin | ToolCallDelta
ChatEvent = Delta | Finished


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChatAnswer:
    """One whole choice, put together from its events."""

    choice: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: ChatEvent) -> None:
        match event:
            case Finished():
                self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
                return
            case TextDelta():
                self.text += event.text
            case ReasoningDelta():
                self.reasoning += event.text
            case ToolCallBegin():
                self.tool_calls.append(ToolCall(event.id, event.name))
            case ToolCallDelta():
                self.tool_calls[event.index].arguments += event.arguments
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs


# Conversations for chat templates, built from the smaller parts that other APIs send.

_SEPARATOR = "\n\n"


class ConversationBuilder:
    """Builds the messages of a conversation part by part.

    Consecutive thinking, text and calls of the assistant become one message, as does all that the
    system says first.
    """

    def __init__(self, param: str) -> None:
        self.param = param
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        self._open_calls: dict[str, str] = {}
        self._truncated_calls: set[str] = set()
        """Calls without whole arguments, which may have results and need none."""

    def system(self, text: str) -> None:
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += _SEPARATOR + text
        else:
            self.messages.append({"role": "system", "content": text})

    def user(self, text: str, *, merge: bool = False) -> None:
        """Adds a user's text; `merge` appends it to the last message if that is the user's too."""
        if merge and self._last_role == "user":
            self.messages[-1]["content"] += _SEPARATOR + text
        else:
            self.messages.append({"role": "user", "content": text})

    def reasoning(self, text: str) -> None:
        self._append("reasoning_content", text)

    def assistant(self, text: str) -> None:
        self._append("content", text)

    def call(self, id: str, name: str, arguments: str, param: str) -> None:
        """Adds a tool call. `arguments`: the text of a JSON object; empty is one without members.

        A call with other arguments becomes text: an answer that was cut short had no more of it.
        """
        arguments = arguments or "{}"
        if id in self._names:
            raise RequestError(f"'{param}': there are two calls with the id '{id}'.", param=param)
        self._names[id] = self._open_calls[id] = name
        if not is_json_object(arguments):
            self._open_calls.pop(id)
            self._truncated_calls.add(id)
            self.assistant(call_text(name, arguments))
            return
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant().setdefault("tool_calls", []).append(call)

    def result(self, id: str, text: str, param: str) -> None:
        if id in self._truncated_calls:
            self._truncated_calls.remove(id)
            self._open_calls[id] = self._names[id]
        if id not in self._open_calls:
            what = "has its result already" if id in self._names else "is not in the conversation"
            raise RequestError(f"'{param}': the call '{id}' {what}.", param=param)
        name = self._open_calls.pop(id)
        self.messages.append({"role": "tool", "tool_call_id": id, "name": name, "content": text})

    def finish(self) -> list[dict[str, Any]]:
        for id in self._open_calls:
            raise RequestError(
                f"the call '{id}' has no result in '{self.param}'.", param=self.param
            )
        return self.messages

    @property
    def _last_role(self) -> str | None:
        return self.messages[-1]["role"] if self.messages else None

    def _assistant(self) -> dict[str, Any]:
        if self._last_role != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _append(self, name: str, text: str) -> None:
        message = self._assistant()
        before = message.get(name)
        message[name] = before + _SEPARATOR + text if before and text else (before or "") + text


def call_text(name: str, arguments: str) -> str:
    """Returns a call as text, for arguments that are not the text of a JSON object."""
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}'


def is_json_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
