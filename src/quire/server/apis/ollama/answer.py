"""Answers of `/api/chat` and `/api/generate`: a JSON object, or one on each line of a stream."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.apis.openai.logprobs import chat_logprobs
from quire.server.apis.openai.objects import ChatTokenLogprob
from quire.server.chat.dialogue import (
    ChatEvent,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from quire.server.chat.text import CompletionUsage
from quire.server.errors import ApiError
from quire.server.http.ollama_errors import error_body

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

LINES = "application/x-ndjson"
_encoder = msgspec.json.Encoder()


class CalledFunctionValues(msgspec.Struct):
    """A called function. index: of the call in its answer."""

    name: str
    arguments: dict[str, Any]
    index: int = 0


class AnswerCall(msgspec.Struct):
    id: str
    function: CalledFunctionValues


class AnswerMessage(msgspec.Struct):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """An answer, or a line of a stream. Durations are in nanoseconds.

    Chats have a `message`. `/api/generate` has `response` and `thinking`. The counts and durations
    come with `done`.
    """

    model: str
    created_at: str
    message: AnswerMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class CountedReply(Protocol):
    """A running generation, of which the writer needs the token counts."""

    @property
    def usage(self) -> CompletionUsage: ...


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def loaded(model: str, chat: bool) -> OllamaAnswer:
    """Returns the answer to an empty request, which asks Ollama to load the model."""
    return OllamaAnswer(
        model=model,
        created_at=now(),
        message=AnswerMessage() if chat else UNSET,
        response=UNSET if chat else "",
        done=True,
        done_reason="load",
    )


class AnswerWriter:
    """Turns chat events into answers.

    Args:
        chat: the route is `/api/chat`.
        began: time of `time.perf_counter_ns` at which the request arrived.
        prompt_ids: the prompt's token ids if the answer has a `context`.
        top_logprobs: alternatives per token; None returns no log-probabilities.
    """

    def __init__(
        self,
        model: str,
        reply: CountedReply,
        tokenizer: Tokenizer | None,
        *,
        chat: bool,
        began: int,
        prompt_ids: list[int] | None = None,
        top_logprobs: int | None = None,
    ) -> None:
        self._model = model
        self._reply = reply
        self._tokenizer = tokenizer
        self._chat = chat
        self._began = began
        self._first: int | None = None
        self._prompt_ids = prompt_ids
        self._output_ids: list[int] = []
        self._top_logprobs = top_logprobs
        self._call: ToolCallBegin | None = None
        self._arguments: list[str] = []
        self._reason = "stop"

    # -- streams -------------------------------------------------------------------------------

    def write(self, buffer: bytearray, events: list[ChatEvent]) -> None:
        for line in self._lines(events):
            _write_line(buffer, line)

    def finish(self, buffer: bytearray) -> None:
        _write_line(buffer, self._ended(self._line()))

    def fail(self, buffer: bytearray, error: ApiError) -> None:
        _write_line(buffer, error_body(error))

    # -- whole answers -------------------------------------------------------------------------

    def whole(self, events: list[ChatEvent]) -> OllamaAnswer:
        """Returns all events as one answer."""
        answer = self._line()
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[AnswerCall] = []
        logprobs: list[ChatTokenLogprob] = []
        for line in self._lines(events):
            message = line.message
            if isinstance(message, AnswerMessage):
                texts.append(message.content)
                thoughts.append(message.thinking or "")
                calls += message.tool_calls or []
            else:
                texts.append(line.response or "")
                thoughts.append(line.thinking or "")
            logprobs += line.logprobs or []
        text, thinking = "".join(texts), "".join(thoughts) or UNSET
        if self._chat:
            answer.message = AnswerMessage(
                content=text, thinking=thinking, tool_calls=calls or UNSET
            )
        else:
            answer.response, answer.thinking = text, thinking
        if self._top_logprobs is not None:
            answer.logprobs = logprobs
        return self._ended(answer)

    # -- both ----------------------------------------------------------------------------------

    def note_first(self) -> None:
        """Notes the time of the first events. Whole answers call it as events arrive."""
        if self._first is None:
            self._first = time.perf_counter_ns()

    def _lines(self, events: list[ChatEvent]) -> list[OllamaAnswer]:
        lines = []
        for event in events:
            self.note_first()
            if not isinstance(event, Finished):
                self._output_ids += event.token_ids
            if not isinstance(event, ToolCallDelta) and self._call is not None:
                lines += self._called()
            match event:
                case TextDelta() if event.text or event.logprobs:
                    lines.append(self._line(event.text, event=event))
                case ReasoningDelta() if event.text or event.logprobs:
                    lines.append(self._line(thinking=event.text, event=event))
                case ToolCallBegin():
                    self._call = event
                case ToolCallDelta():
                    self._arguments.append(event.arguments)
                case Finished():
                    self._reason = "length" if event.finish_reason == "length" else "stop"
        return lines

    def _called(self) -> list[OllamaAnswer]:
        """Returns the line of the open call. Ollama's API cannot express arguments that were cut
        off, so such a call is left out."""
        call, self._call = self._call, None
        text, self._arguments = "".join(self._arguments), []
        try:
            arguments = json.loads(text or "{}")
        except ValueError:
            return []
        if call is None or not isinstance(arguments, dict):
            return []
        line = self._line()
        if isinstance(line.message, AnswerMessage):
            function = CalledFunctionValues(call.name, arguments, call.index)
            line.message.tool_calls = [AnswerCall(call.id, function)]
        return [line]

    def _line(
        self, text: str = "", *, thinking: str = "", event: TextDelta | ReasoningDelta | None = None
    ) -> OllamaAnswer:
        line = OllamaAnswer(model=self._model, created_at=now())
        if self._chat:
            line.message = AnswerMessage(content=text, thinking=thinking or UNSET)
        else:
            line.response, line.thinking = text, thinking or UNSET
        if event is not None and self._top_logprobs is not None and self._tokenizer is not None:
            line.logprobs = list(
                chat_logprobs(self._tokenizer, event.token_ids, event.logprobs, self._top_logprobs)
            )
        return line

    def _ended(self, answer: OllamaAnswer) -> OllamaAnswer:
        """Adds the counts and durations."""
        end = time.perf_counter_ns()
        first = end if self._first is None else self._first
        usage = self._reply.usage
        answer.done, answer.done_reason = True, self._reason
        if self._prompt_ids is not None:
            answer.context = [*self._prompt_ids, *self._output_ids]
        answer.total_duration = end - self._began
        answer.load_duration = 0
        answer.prompt_eval_count = usage.prompt_tokens
        answer.prompt_eval_duration = first - self._began
        answer.eval_count = usage.completion_tokens
        answer.eval_duration = end - first
        return answer


def _write_line(buffer: bytearray, value: Any) -> None:
    _encoder.encode_into(value, buffer, -1)
    buffer += b"\n"
