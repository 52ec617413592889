"""`functions` and `function_call`, OpenAI's older names of tools and their choice."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from quire.features.call import PromptPart
from quire.sampling_params import SamplingParams
from quire.server.apis.openai import chat
from quire.server.apis.openai.beams import beams_of
from quire.server.apis.openai.chunks import ChunkWriter
from quire.server.apis.openai.convert import (
    check_fan_out,
    check_logprobs,
    check_prompt_logprobs,
    check_routed_experts,
    check_streaming,
    sampling_params,
    usual_room,
)
from quire.server.apis.openai.logprobs import (
    are_many,
    array_entries,
    chat_logprobs,
    encoded,
    entries_in,
    formatted,
    prompt_logprobs,
)
from quire.server.apis.openai.messages import FunctionName, check_continuation, template_messages
from quire.server.apis.openai.objects import (
    ChatChoice,
    ChatChunkChoice,
    ChatCustomCall,
    ChatDelta,
    ChatFunctionCall,
    ChatLogprobs,
    ChatMessage,
    CompletionObject,
    CustomDelta,
    FunctionDelta,
    MessageToolCall,
    TokensOfVersion,
    ToolCallChunk,
    routed_experts_of,
    sampling_info_of,
    versions_of,
)
from quire.server.apis.openai.protocol import ChatRequest
from quire.server.apis.openai.stored_chats import StoredChat, chat_store, check_store
from quire.server.apis.openai.structured import structured_field
from quire.server.apis.openai.vocabulary import prompt_room
from quire.server.chat.dialogue import (
    ChatAnswer,
    ChatEvent,
    Delta,
    Dialogue,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolCallBegin,
    ToolCallDelta,
    ToolChoice,
)
from quire.server.chat.generation import ChatGeneration, prepare
from quire.server.chat.prompt_parts import shown_messages
from quire.server.chat.thinking import effort_variables, template_variables
from quire.server.context.request_context import context_of, owner_of
from quire.server.errors import ApiError, blame_field, rename_fields
from quire.server.http.bodies import read_body
from quire.server.http.sse import EventStream, json_response, start_stream, unless_disconnected
from quire.server.state import ServerState, new_id, state_of

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

ERROR_NAMES = {"tools": "functions", ".function.": ".", "tool_choice": "function_call"}
"""Maps parts of fields' paths to their older names."""


def check(body: ChatRequest) -> None:
    """Checks that older and newer fields are not mixed. Raises ApiError."""
    for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(body, old) and getattr(body, new):
            raise ApiError(400, f"'{old}' and '{new}' exclude each other.", param=old)
    if isinstance(body.function_call, FunctionName) and not body.functions:
        raise ApiError(400, "'function_call' needs 'functions'.", param="function_call")


def tools_of(body: ChatRequest) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": function.model_dump(exclude_none=True)}
        for function in body.functions or ()
    ]


def choice_of(body: ChatRequest) -> ToolChoice:
    choice = body.function_call
    if isinstance(choice, FunctionName):
        return ToolChoice.named(choice.name)
    return ToolChoice(choice or "auto")


def as_function_call(message: ChatMessage) -> None:
    """Turns the message's call, which is one at most, into a `function_call`."""
    for call in [] if message.tool_calls is UNSET else message.tool_calls:
        message.function_call = call.function
    message.tool_calls = UNSET


def delta_as_function_call(delta: ChatDelta) -> None:
    for call in [] if delta.tool_calls is UNSET else delta.tool_calls:
        delta.function_call = call.function
    delta.tool_calls = UNSET


def finish_reason(reason: str | None) -> str | None:
    return "function_call" if reason == "tool_calls" else reason


# `/v1/chat/completions`.


async def chat_completions(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, ChatRequest, state.args.max_body_bytes)
    state.check_alive()
    state.check_model(body.model, context_of(request))
    state.check_generates()
    tokenizer = state.tokenizer("messages")
    check_fan_out(1, max(body.n or 1, body.beam_width or 1))
    _check(body)
    chat.check(body)
    if body.chat_template is not None and not state.args.trust_request_chat_template:
        raise ApiError(
            400,
            "'chat_template': this server takes no templates from requests "
            "(--trust-request-chat-template).",
            param="chat_template",
            code="unsupported_parameter",
        )
    if body.store:
        check_store(request)
    dialogue = _dialogue(state, body)
    names = {"structured_outputs": structured_field(body)}
    if body.functions:
        names |= chat.ERROR_NAMES
    with rename_fields(names):
        reply = await prepare(state, dialogue, context_of(request))
    check_prompt_logprobs(len(reply.prompt_token_ids), reply.params, 1, "prompt_logprobs")
    check_routed_experts(state.client.config, reply.params, [len(reply.prompt_token_ids)])
    model = context_of(request).model or state.model_name
    writer = ChatWriter(model, state.fingerprint, tokenizer, body, reply)

    def keep(envelope: CompletionObject[ChatChoice]) -> None:
        if body.store:
            messages = shown_messages(dialogue.messages, dialogue.parts)
            stored = StoredChat(envelope, messages, owner_of(request))
            chat_store(request).add(stored)

    with rename_fields(names), blame_field("messages"):
        if not body.stream:
            answers = await unless_disconnected(request.receive, reply.whole())
            size = entries_in(reply.prompt_logprobs or ()) + _size(answers, reply)
            envelope = await formatted(size, lambda: writer.answer(answers))
            keep(envelope)
            return json_response(envelope)
        await start_stream(request, reply)

    def finish(buffer: bytearray) -> None:
        writer.chunks.finish(buffer)
        if body.store:
            keep(writer.answer([writer.answers[choice] for choice in sorted(writer.answers)]))

    return EventStream(
        reply,
        writer.write,
        finish,
        is_long=lambda events: are_many(_size(events, reply)),
        metrics=state.metrics,
    )


def _size(parts: Sequence[ChatEvent | ChatAnswer], reply: ChatGeneration) -> int:
    """Returns the number of values that parts of a reply are written with, besides text."""
    ends = [part.choice for part in parts if isinstance(part, (Finished, ChatAnswer))]
    arrays = sum(array_entries(reply.last_update(choice)) for choice in ends)
    logprobs = (entries_in(part.logprobs) for part in parts if not isinstance(part, Finished))
    return arrays + sum(logprobs)


def _dialogue(state: ServerState, body: ChatRequest) -> Dialogue:
    kwargs = dict(body.chat_template_kwargs or {})
    if body.documents:
        kwargs["documents"] = body.documents
    if body.verbosity not in (None, "medium"):
        kwargs["verbosity"] = body.verbosity
    if body.reasoning_effort is not None:
        known = frozenset({"reasoning_effort"})  # a request's own template is looked at later
        if body.chat_template is None:
            known = template_variables(state, "messages", with_tools=bool(body.tools))
        kwargs |= effort_variables(state, body.reasoning_effort, known, "reasoning_effort")
    params, most = _params(state, body), state.client.config.scheduler.max_model_len
    check_logprobs(params, 1, most, "top_logprobs")
    beams = beams_of(body, params, body.n or 1, None)
    room = usual_room(params, most)
    if beams is not None and room is not None:
        beams = replace(beams, max_tokens=room)
    parts: list[PromptPart] = []
    return Dialogue(
        messages=template_messages(body.messages, parts),
        parts=parts,
        params=params,
        default_max_tokens=room,
        beams=beams,
        tools=[tool.shape for tool in body.tools or ()] or chat.tools_of(body),
        custom_tools=frozenset(tool.custom.name for tool in body.tools or () if tool.custom),
        tool_choice=body.tool_choice or chat.choice_of(body),
        parallel_tool_calls=body.parallel_tool_calls is not False and not body.functions,
        chat_template=body.chat_template,
        template_kwargs=kwargs,
        add_generation_prompt=body.add_generation_prompt is not False,
        add_special_tokens=bool(body.add_special_tokens),
        most_prompt_tokens=prompt_room(
            body.truncate_prompt_tokens,
            most,
            _max_tokens(body),
        ),
        truncation_side=body.truncation_side,
        continue_final_message=bool(body.continue_final_message),
        include_reasoning=body.include_reasoning is not False,
        with_tokens=bool(body.logprobs or body.return_token_ids),
        request_id=new_id("chatcmpl"),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "'top_logprobs' needs logprobs=true.", param="top_logprobs")
    check_streaming(body)
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        raise ApiError(
            400,
            "'max_tokens' and 'max_completion_tokens' are two names of one setting; they differ.",
            param="max_tokens",
        )
    if body.return_tokens_as_token_ids and not body.logprobs:
        raise ApiError(
            400,
            "'return_tokens_as_token_ids' needs logprobs=true.",
            param="return_tokens_as_token_ids",
        )
    if body.request_id is not None and body.store:
        raise ApiError(
            400,
            "'request_id' is not available with store=true: stored answers have ids of the "
            "server's.",
            param="request_id",
        )
    if body.echo and (body.messages[-1].role != "assistant" or not body.messages[-1].text):
        raise ApiError(400, "'echo' needs a last message of the assistant.", param="echo")
    check_continuation(body.messages, body.continue_final_message, body.add_generation_prompt)


def _params(state: ServerState, body: ChatRequest) -> SamplingParams:
    return sampling_params(
        body,
        state,
        max_tokens=_max_tokens(body),
        n=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        blamed="top_logprobs",
    )


def _max_tokens(body: ChatRequest) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


class ChatWriter:
    """Turns answers into messages, and events into deltas."""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        body: ChatRequest,
        reply: ChatGeneration,
    ) -> None:
        self.body = body
        self.tokenizer = tokenizer
        self.reply = reply
        self.model = model
        self.created = int(time.time())
        self.fingerprint = fingerprint
        self.chunks = ChunkWriter(
            body.stream_options,
            lambda choices, usage: self._envelope("chat.completion.chunk", choices, usage),
            lambda: reply.usage,
        )
        self.id = reply.request_id if body.request_id is None else f"chatcmpl-{body.request_id}"
        self.echoed = body.messages[-1].text if body.echo else ""
        # A stream that will be stored keeps its text so far, and its log-probabilities as they
        # were sent. Formatting all of them again at the end would keep other requests waiting.
        self.answers: dict[int, ChatAnswer] = {}
        self.sent: dict[int, ChatLogprobs] = {}
        self.begun: set[int] = set()

    def answer(self, answers: list[ChatAnswer]) -> CompletionObject[ChatChoice]:
        choices = []
        for answer in answers:
            choice = ChatChoice(
                answer.choice,
                _message(answer, self.echoed),
                self.sent.get(answer.choice) or self._logprobs(answer),
                answer.finish_reason,
            )
            if self.body.functions:
                chat.as_function_call(choice.message)
                choice.finish_reason = chat.finish_reason(choice.finish_reason)
            if answer.stop_reason is not None:
                choice.stop_reason = answer.stop_reason
            if self.body.return_token_ids:
                choice.token_ids = answer.token_ids
            choice.weight_versions = self._versions(answer.choice)
            self._add_rollout(choice)
            choices.append(choice)
        envelope = self._envelope("chat.completion", choices, self.reply.usage)
        if self.body.metadata is not None:
            envelope.metadata = self.body.metadata
        if self.body.prompt_logprobs is not None:
            envelope.prompt_logprobs = prompt_logprobs(self.reply.prompt_logprobs)
        envelope.prompt_token_ids = self._prompt_token_ids
        return envelope

    @property
    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return self.reply.prompt_token_ids if self.body.return_token_ids else UNSET

    def write(self, buffer: bytearray, events: list[ChatEvent]) -> None:
        for event in events:
            if event.choice not in self.begun:
                self.begun.add(event.choice)
                opening = ChatChunkChoice(
                    event.choice, ChatDelta("assistant", self.echoed), None, None
                )
                self.chunks.write(buffer, opening, self._prompt_token_ids)
            chunk = self._chunk(event)
            self.chunks.write(buffer, chunk)
            if self.body.store:
                self.answers.setdefault(event.choice, ChatAnswer(event.choice)).add(event)
                if chunk.logprobs is not None:
                    sent = self.sent.setdefault(event.choice, ChatLogprobs([]))
                    sent.content += chunk.logprobs.content

    def _chunk(self, event: ChatEvent) -> ChatChunkChoice:
        if isinstance(event, Finished):
            choice = ChatChunkChoice(event.choice, ChatDelta(), None, event.finish_reason)
            if self.body.functions:
                choice.finish_reason = chat.finish_reason(choice.finish_reason)
            if event.stop_reason is not None:
                choice.stop_reason = event.stop_reason
            choice.weight_versions = self._versions(event.choice)
            self._add_rollout(choice)
            return choice
        choice = ChatChunkChoice(event.choice, _delta(event), self._logprobs(event), None)
        if self.body.functions:
            chat.delta_as_function_call(choice.delta)
        if self.body.return_token_ids:
            choice.token_ids = event.token_ids
        return choice

    def _versions(self, choice: int) -> list[TokensOfVersion] | UnsetType:
        runs = self.reply.versions(choice)
        return versions_of(runs, always=bool(self.body.return_token_ids))

    def _add_rollout(self, choice: ChatChoice | ChatChunkChoice) -> None:
        """Adds the arrays about all tokens of a choice that has ended."""
        last = self.reply.last_update(choice.index)
        choice.sampling_info = sampling_info_of(last)
        choice.routed_experts = routed_experts_of(last)

    def _envelope(self, kind: str, choices: Any, usage: Any) -> CompletionObject[Any]:
        tier = self.body.service_tier
        return CompletionObject(
            self.id,
            kind,
            self.created,
            self.model,
            choices,
            usage,
            service_tier=UNSET if tier is None else "default",
            system_fingerprint=self.fingerprint,
        )

    def _logprobs(self, part: Delta | ChatAnswer) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        count = self.reply.params.logprobs or 0
        as_ids = bool(self.body.return_tokens_as_token_ids)
        entries = chat_logprobs(self.tokenizer, part.token_ids, part.logprobs, count, as_ids=as_ids)
        return ChatLogprobs([encoded(entry) for entry in entries])


def _message(answer: ChatAnswer, echoed: str) -> ChatMessage:
    text = echoed + answer.text
    only_other = not text and (answer.tool_calls or answer.reasoning)
    message = ChatMessage(None if only_other else text)
    if answer.reasoning:
        message.reasoning = message.reasoning_content = answer.reasoning
    if answer.tool_calls:
        message.tool_calls = [_tool_call(call) for call in answer.tool_calls]
    return message


def _tool_call(call: ToolCall) -> MessageToolCall:
    if call.is_custom:
        custom = ChatCustomCall(call.name, call.arguments)
        return MessageToolCall(call.id, custom=custom, type="custom")
    return MessageToolCall(call.id, ChatFunctionCall(call.name, call.arguments))


def _delta(event: Delta) -> ChatDelta:
    match event:
        case TextDelta(text=text):
            return ChatDelta(content=text) if text else ChatDelta()
        case ReasoningDelta(text=text):
            return ChatDelta(reasoning=text, reasoning_content=text) if text else ChatDelta()
        case ToolCallBegin(is_custom=True):
            chunk = ToolCallChunk(event.index, custom=CustomDelta(event.name))
            chunk.id, chunk.type = event.id, "custom"
        case ToolCallBegin():
            chunk = ToolCallChunk(event.index, FunctionDelta(event.name))
            chunk.id, chunk.type = event.id, "function"
        case ToolCallDelta(is_custom=True):
            chunk = ToolCallChunk(event.index, custom=CustomDelta(input=event.arguments))
        case ToolCallDelta():
            chunk = ToolCallChunk(event.index, FunctionDelta(arguments=event.arguments))
    return ChatDelta(tool_calls=[chunk])
