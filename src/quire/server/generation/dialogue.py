"""Requests and events that all chat-like routes share.

A route turns its own body into a `Dialogue`, which `chat.prepare` starts. The events below come
back, and the route writes them in its API's shape.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quire.engine.loop.beam_search import BeamSearchParams
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
        usual_max_tokens: most tokens of an answer where `params` names none; None leaves it to the
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
    usual_max_tokens: int | None = None
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
Event = Delta | Finished


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

    def add(self, event: Event) -> None:
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
