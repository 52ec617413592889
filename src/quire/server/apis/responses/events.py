"""Events of a streamed response, and the response itself, built from the model's output."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from quire.server.apis.responses.items import (
    ErrorDetails,
    IncompleteDetails,
    OutputCall,
    OutputCustomToolCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputReasoningText,
    OutputText,
    OutputTokenLogprob,
    OutputToolSearchCall,
    Response,
    ResponseUsage,
)
from quire.server.apis.responses.tools import TOOL_SEARCH
from quire.server.chat.sealed import seal
from quire.server.errors import ApiError
from quire.server.http.sse import pad_event
from quire.server.state import new_id

_encoder = msgspec.json.Encoder()


class ResponseEvent(NamedTuple):
    """An event: its type and its JSON."""

    type: str
    data: bytes

    def write(self, buffer: bytearray, obfuscate: bool) -> None:
        """Writes the event as a server-sent event."""
        data = self.data
        if obfuscate and self.type.endswith(".delta"):
            data = pad_event(data)
        buffer += b"event: " + self.type.encode() + b"\ndata: " + data + b"\n\n"


class ResponseWriter:
    """Builds `response` and its events, which wait in `out` until `take`.

    Args:
        namespaced: maps the names by which the model knows tools to their namespaces and names.
        searches: the model knows a tool that finds tools.
        seals: reasoning items get `encrypted_content`.

    Attributes:
        streams: False makes no events.
    """

    def __init__(
        self,
        response: Response,
        namespaced: Mapping[str, tuple[str, str]] | None = None,
        *,
        searches: bool = False,
        seals: bool = False,
    ) -> None:
        self.response = response
        self._namespaced = namespaced or {}
        self._searches = searches
        self._seals = seals
        self.streams = True
        self.out: list[ResponseEvent] = []
        self.count = 0
        self._item: OutputItem | None = None
        self._texts: list[str] = []
        self._logprobs: list[msgspec.Raw] = []
        self._short_logprobs: list[msgspec.Raw] = []

    def take(self) -> list[ResponseEvent]:
        out, self.out = self.out, []
        return out

    def begin(self) -> None:
        self._lifecycle("created")
        if self.response.status == "queued":
            self._lifecycle("queued")

    def progress(self) -> None:
        """Notes that the model has begun."""
        self.response.status = "in_progress"
        self._lifecycle("in_progress")

    def text(self, text: str, logprobs: list[OutputTokenLogprob]) -> None:
        """Adds text. Tokens without text leave only their log-probabilities, and these only in a
        message.

        Log-probabilities are encoded once: the end repeats all of them several times.
        """
        if not isinstance(self._item, OutputMessage):
            if not text:
                return
            self._open_message()
        self._texts.append(text)
        self._logprobs += [msgspec.Raw(_encoder.encode(entry)) for entry in logprobs]
        short = [msgspec.Raw(_encoder.encode(_without_bytes(entry))) for entry in logprobs]
        self._short_logprobs += short
        self._in_part("response.output_text.delta", delta=text, logprobs=short)

    def reasoning(self, text: str) -> None:
        if not text:
            return
        if not isinstance(self._item, OutputReasoning):
            self._open(OutputReasoning(new_id("rs", "_"), "in_progress", []), OutputReasoningText())
        self._texts.append(text)
        self._in_part("response.reasoning_text.delta", delta=text)

    def call(self, call_id: str, name: str, *, custom: bool = False) -> None:
        namespace, own = self._namespaced.get(name, (UNSET, name))
        call: OutputCall
        if custom:
            call = OutputCustomToolCall(
                new_id("ctc", "_"), "in_progress", call_id, own, namespace=namespace
            )
        elif self._searches and name == TOOL_SEARCH:
            call = OutputToolSearchCall(new_id("tsc", "_"), "in_progress", call_id)
        else:
            call = OutputFunctionCall(
                new_id("fc", "_"), "in_progress", call_id, own, namespace=namespace
            )
        self._open(call, None)

    def arguments(self, text: str) -> None:
        """Adds to the arguments, or to the input, of the call that began last."""
        item = self._item
        if not text or not isinstance(item, OutputCall):
            return
        self._texts.append(text)
        if isinstance(item, OutputFunctionCall):
            self._of_item("response.function_call_arguments.delta", delta=text)
        elif isinstance(item, OutputCustomToolCall):
            self._of_item("response.custom_tool_call_input.delta", delta=text)

    @property
    def in_call(self) -> bool:
        """Whether the model is writing a call of a tool."""
        return isinstance(self._item, OutputCall)

    def take_number(self) -> int:
        """Returns the sequence number for an event that is sent apart from the others."""
        self.count += 1
        return self.count - 1

    def finish(
        self, usage: ResponseUsage, *, incomplete: str | None = None, empty: bool = False
    ) -> None:
        """Ends the response.

        Args:
            incomplete: why it ends before the model has ended it.
            empty: a response without output gets no empty message.
        """
        response = self.response
        if not response.output and not empty:
            self._open_message()
        self.close("completed" if incomplete is None else "incomplete")
        response.usage = usage
        if incomplete is not None:
            response.incomplete_details = IncompleteDetails(incomplete)
            response.status = "incomplete"
        else:
            response.completed_at = int(time.time())
            response.status = "completed"
        self._lifecycle(response.status)

    def fail(self, error: ApiError) -> None:
        """Ends the response by an error: first its event, then the response as far as it came."""
        self.close("incomplete")
        self._emit("error", code=error.code, message=str(error), param=error.param)
        self.response.status = "failed"
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.response.error = ErrorDetails(code, str(error))
        self._lifecycle("failed")

    def cancel(self) -> None:
        """Ends the response by request, which has no event of its own."""
        self.close("incomplete")
        self.response.status = "cancelled"

    def flush(self) -> None:
        """Puts the text so far into the open item, so that the response shows it."""
        item, text = self._item, "".join(self._texts)
        self._texts = [text] if text else []
        if isinstance(item, OutputFunctionCall):
            item.arguments = text
        elif isinstance(item, OutputCustomToolCall):
            item.input = text
        elif isinstance(item, OutputToolSearchCall):
            with contextlib.suppress(msgspec.DecodeError):  # A call may be cut short.
                item.arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
        elif item is not None:
            item.content[0].text = text
        if isinstance(item, OutputMessage):
            item.content[0].logprobs = self._logprobs

    def close(self, status: str) -> None:
        """Ends the open item, if there is one."""
        item = self._item
        if item is None:
            return
        self.flush()
        item.status = status
        if isinstance(item, OutputFunctionCall):
            self._of_item(
                "response.function_call_arguments.done", name=item.name, arguments=item.arguments
            )
        elif isinstance(item, OutputCustomToolCall):
            self._of_item("response.custom_tool_call_input.done", input=item.input)
        elif not isinstance(item, OutputToolSearchCall):
            part = item.content[0]
            if isinstance(part, OutputText):
                self._in_part(
                    "response.output_text.done", text=part.text, logprobs=self._short_logprobs
                )
            else:
                self._in_part("response.reasoning_text.done", text=part.text)
                if self._seals and isinstance(item, OutputReasoning):
                    item.encrypted_content = seal("reasoning", part.text)
            self._in_part("response.content_part.done", part=part)
        self._emit("response.output_item.done", output_index=self._place, item=item)
        self._item, self._texts, self._logprobs, self._short_logprobs = None, [], [], []

    def _open_message(self) -> None:
        self._open(OutputMessage(new_id("msg", "_"), "in_progress", []), OutputText())

    def _open(self, item: OutputItem, part: OutputText | OutputReasoningText | None) -> None:
        self.close("completed")
        self._item = item
        self.response.output.append(item)
        self._emit("response.output_item.added", output_index=self._place, item=item)
        if not isinstance(item, OutputCall) and part is not None:
            self._in_part("response.content_part.added", part=part)
            item.content.append(part)  # type: ignore[arg-type]

    @property
    def _place(self) -> int:
        return len(self.response.output) - 1

    def _lifecycle(self, name: str) -> None:
        self._emit(f"response.{name}", response=self.response)

    def _of_item(self, kind: str, **fields: Any) -> None:
        id = self._item.id if self._item is not None else None
        self._emit(kind, item_id=id, output_index=self._place, **fields)

    def _in_part(self, kind: str, **fields: Any) -> None:
        self._of_item(kind, content_index=0, **fields)

    def _emit(self, kind: str, **fields: Any) -> None:
        if self.streams:
            event = {"type": kind, "sequence_number": self.count, **fields}
            self.out.append(ResponseEvent(kind, _encoder.encode(event)))
            self.count += 1


def _without_bytes(entry: OutputTokenLogprob) -> dict[str, Any]:
    """Returns a token's log-probabilities as events have them: without bytes."""
    return {
        "token": entry.token,
        "logprob": entry.logprob,
        "top_logprobs": [
            {"token": top.token, "logprob": top.logprob} for top in entry.top_logprobs
        ],
    }
