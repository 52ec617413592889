"""Dialogues, chat events and conversations, which all chat-like routes share."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from quire.engine.loop.beam_search import BeamSearchParams
from quire.errors import RequestError
from quire.features.call import PromptPart
from quire.outputs import Logprob
from quire.sampling_params import SamplingParams
from quire.server.chat.prompt_memo import PromptMemo
from quire.server.chat.prompt_parts import joined


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model may or must call tools, and which ones.

    Attributes:
        names: the tools that it may call; None allows all tools of the dialogue.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None

    @classmethod
    def named(cls, name: str) -> ToolChoice:
        """Returns the choice that makes the model call this tool once."""
        return cls("required", (name,))


@dataclass(slots=True, kw_only=True)
class Dialogue:
    """A conversation that the model is to answer.

    Attributes:
        messages: one dict per message, in the shape that chat templates take. All have role
            (system, user, assistant, tool) and content (text; None is allowed with tool calls).
            Optional are name, tool_call_id, reasoning_content, and tool_calls in OpenAI's shape
            with arguments as JSON text.
        parts: the parts of messages that are no text. Marks in contents stand for them.
        params: sampling parameters, including n, max_tokens and structured_outputs.
        default_max_tokens: most tokens of an answer if `params` sets no limit; None leaves the
            limit to the context.
        tools: tools in OpenAI's shape: {"type": "function", "function": {name, description,
            parameters, strict}}.
        custom_tools: names of the tools that stand for custom tools, see `custom_tools`.
        found_tools: names of the tools that messages show, so that the template need not.
        parallel_tool_calls: False allows one call at most.
        chat_template: replaces the model's own template.
        template_kwargs: further variables of the chat template, such as documents.
        add_generation_prompt: the template begins the assistant's turn.
        continue_final_message: the model continues the last message instead of a new turn.
        add_special_tokens: the tokenizer adds its own special tokens to the template's text.
        most_prompt_tokens: number of prompt tokens to keep; None keeps all.
        truncation_side: side on which the other tokens are dropped, by default the left.
        include_reasoning: False leaves reasoning out of the events. It is still generated.
        beams: searches for the likeliest answers instead of sampling them.
        memo: has the tokens of the conversation so far; None tokenizes the whole prompt.
        with_tokens: tokens without text, such as the end of sequence, get an event too. Routes set
            it if they return token ids or log-probabilities.
    """

    messages: list[dict[str, Any]]
    params: SamplingParams
    parts: list[PromptPart] = field(default_factory=list)
    default_max_tokens: int | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    custom_tools: frozenset[str] = frozenset()
    found_tools: frozenset[str] = frozenset()
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
    memo: PromptMemo | None = None
    with_tokens: bool = False
    request_id: str
    priority: int = 0
    cache_salt: str = ""


# Chat events, stage 4 of a text. For each choice the reasoning comes first. Text and tool calls
# follow in the model's order, then exactly one `Finished`. Every token is in one event's
# `token_ids`, in order. Its text may come with the next event.


@dataclass(slots=True)
class TextDelta:
    """More text of the answer."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]


@dataclass(slots=True)
class ReasoningDelta:
    """More text of the reasoning."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]


@dataclass(slots=True)
class ToolCallBegin:
    """The start of a tool call.

    Attributes:
        index: number of the call in its choice, from 0.
        is_custom: the tool is a custom tool.
    """

    choice: int
    index: int
    id: str
    name: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    is_custom: bool = False


@dataclass(slots=True)
class ToolCallDelta:
    """More of the JSON text of a call's arguments, or of a custom tool's input."""

    choice: int
    index: int
    arguments: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    is_custom: bool = False


@dataclass(slots=True)
class Finished:
    """The end of a choice.

    Attributes:
        finish_reason: stop, length or abort; tool_calls if the choice stopped after a whole call.
        stop_reason: the stop string or stop token id that ended it; None for the end-of-sequence
            token.
    """

    choice: int
    finish_reason: str
    stop_reason: int | str | None = None


Delta = TextDelta | ReasoningDelta | ToolCallBegin | ToolCallDelta
ChatEvent = Delta | Finished
"""Stage 4 of a text: a `ChoiceText` split into reasoning, text and tool calls."""


@dataclass(slots=True)
class ToolCall:
    """A call.

    Attributes:
        arguments: JSON text, or the input of a custom tool.
    """

    id: str
    name: str
    arguments: str = ""
    is_custom: bool = False


@dataclass(slots=True)
class ChatAnswer:
    """One complete choice, merged from its events."""

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
                call = ToolCall(event.id, event.name, is_custom=event.is_custom)
                self.tool_calls.append(call)
            case ToolCallDelta():
                self.tool_calls[event.index].arguments += event.arguments
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs


# Some APIs send a conversation in smaller parts. They are merged into a chat template's messages.

_SEPARATOR = "\n\n"


class ConversationBuilder:
    """Builds the messages of a conversation part by part.

    Consecutive thinking, text and calls of the assistant become one message. So do all system texts
    at the beginning.

    Args:
        param: name of the field that holds the conversation, for errors.
    """

    def __init__(self, param: str) -> None:
        self.param = param
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        self._open_calls: dict[str, str] = {}
        self._truncated_calls: set[str] = set()
        """Ids of calls whose arguments were cut off. They may have a result, but need none."""

    def system(self, text: str) -> None:
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += _SEPARATOR + text
        else:
            self.messages.append({"role": "system", "content": text})

    def user(self, text: str, *, merge: bool = False) -> None:
        """Adds a user's text.

        Args:
            merge: append it to the last message if that is also the user's.
        """
        if merge and self._last_role == "user":
            self.messages[-1]["content"] = joined(self.messages[-1]["content"], text)
        else:
            self.messages.append({"role": "user", "content": text})

    def reasoning(self, text: str) -> None:
        self._append("reasoning_content", text)

    def assistant(self, text: str) -> None:
        self._append("content", text)

    def call(self, id: str, name: str, arguments: str, param: str) -> None:
        """Adds a tool call.

        A call whose arguments are not a JSON object becomes text, because such a call comes from an
        answer that was cut off in the middle of it.

        Args:
            arguments: the text of a JSON object; "" means {}.
            param: name of the call's field, for errors.
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
    """Returns the text for a call whose arguments are not a JSON object."""
    return f'{{"name": {json.dumps(name)}, "arguments": {arguments}'


def is_json_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
