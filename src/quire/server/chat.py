"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.sampling_params import SamplingParams
from quire.server.body import read_body
from quire.server.convert import check_fan_out, sampling_params
from quire.server.errors import ApiError
from quire.server.generation import Generation, Piece, collect
from quire.server.logprobs import chat_logprobs, prompt_logprobs
from quire.server.protocol import ChatRequest
from quire.server.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Envelope,
)
from quire.server.sse import GenerationStream, json_answer, start_stream, unless_gone, write_event
from quire.server.state import ServerState, new_id, state_of

if TYPE_CHECKING:
    from quire.engine.tokenizer import Tokenizer

# What the server or the tokenizer passes to the template itself.
_RESERVED_KWARGS = frozenset(
    {
        "self",
        "messages",
        "add_generation_prompt",
        "chat_template",
        "tools",
        "documents",
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
    }
)


async def chat_completions(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, ChatRequest, state.args.max_body_bytes)
    state.check_alive()
    state.check_model(body.model)
    tokenizer = state.tokenizer("messages")
    check_fan_out(1, body.n)
    _check(body)
    params = _params(state, body)
    prompt = await asyncio.to_thread(render_prompt, tokenizer, body)
    generation = Generation(
        state.client,
        state.metrics,
        [prompt],
        params,
        request_id=new_id("chatcmpl"),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    writer = ChatWriter(state, tokenizer, body, generation)
    if not body.stream:
        pieces = await unless_gone(request.receive, collect(generation))
        return json_answer(writer.answer(pieces))
    await start_stream(request, generation)
    return GenerationStream(generation, writer.write, writer.finish, metrics=state.metrics)


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "'top_logprobs' needs logprobs=true.", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(
            400, "'stream_options' is only allowed with stream=true.", param="stream_options"
        )
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(
            400, "'prompt_logprobs' is not available with stream=true.", param="prompt_logprobs"
        )
    both = body.max_tokens is not None and body.max_completion_tokens is not None
    if both and body.max_tokens != body.max_completion_tokens:
        raise ApiError(
            400,
            "'max_tokens' and 'max_completion_tokens' are two names of one setting; they differ.",
            param="max_tokens",
        )
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise ApiError(
                400,
                "'continue_final_message' and 'add_generation_prompt' exclude each other.",
                param="continue_final_message",
            )
        if body.messages[-1].role != "assistant":
            raise ApiError(
                400,
                "'continue_final_message' needs a last message of the assistant.",
                param="continue_final_message",
            )
    for name in body.chat_template_kwargs or ():
        if name in _RESERVED_KWARGS or not name.isidentifier():
            raise ApiError(
                400,
                f"'{name[:100]}' cannot be set through 'chat_template_kwargs'.",
                param="chat_template_kwargs",
            )


def _params(state: ServerState, body: ChatRequest) -> SamplingParams:
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return sampling_params(
        body,
        state.defaults,
        max_tokens=limit,
        n=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def render_prompt(tokenizer: Tokenizer, body: ChatRequest) -> list[int]:
    """Applies the chat template and tokenizes its text. Runs in a thread.

    The template writes its special tokens itself, so the tokenizer must not add them again. To
    continue the final message, what the template puts after that message's text is cut off.
    """
    messages: list[dict[str, Any]] = []
    for message in body.messages:
        role = "system" if message.role == "developer" else message.role
        named = {} if message.name is None else {"name": message.name}
        messages.append({"role": role, "content": message.text, **named})
    add = body.add_generation_prompt is not False and not body.continue_final_message
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=add, **(body.chat_template_kwargs or {})
    )
    if body.continue_final_message:
        final = messages[-1]["content"].strip()
        at = text.rfind(final)
        if at < 0:
            raise ApiError(
                400,
                "The chat template changes the final message, so it cannot be continued.",
                param="continue_final_message",
            )
        text = text[: at + len(final)]
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).tolist()
    return ids


class ChatWriter:
    """Turns pieces into messages and deltas."""

    def __init__(
        self, state: ServerState, tokenizer: Tokenizer, body: ChatRequest, generation: Generation
    ) -> None:
        self.body = body
        self.tokenizer = tokenizer
        self.generation = generation
        self.model = state.model_name
        self.created = int(time.time())
        self.include_usage = body.stream_options is not None and body.stream_options.include_usage
        self.begun: set[int] = set()

    def answer(self, pieces: list[Piece]) -> Envelope:
        choices = []
        for piece in pieces:
            choice = ChatChoice(
                piece.choice, ChatMessage(piece.text), self._logprobs(piece), piece.finish_reason
            )
            if piece.stop_reason is not None:
                choice.stop_reason = piece.stop_reason
            if self.body.return_token_ids:
                choice.token_ids = piece.token_ids
                choice.prompt_token_ids = self.generation.prompts[0].token_ids
            choices.append(choice)
        envelope = self._envelope("chat.completion", choices, self.generation.usage)
        if self.body.prompt_logprobs is not None:
            envelope.prompt_logprobs = prompt_logprobs(self.generation.prompts[0].logprobs) or []
        return envelope

    def write(self, buffer: bytearray, pieces: list[Piece]) -> None:
        usage = None if self.include_usage else UNSET
        for piece in pieces:
            if piece.choice not in self.begun:
                self.begun.add(piece.choice)
                opening = ChatChunkChoice(piece.choice, ChatDelta("assistant", ""), None, None)
                self._event(buffer, opening, usage)
            choice = ChatChunkChoice(
                piece.choice,
                ChatDelta(content=piece.text) if piece.text else ChatDelta(),
                self._logprobs(piece),
                piece.finish_reason,
            )
            if piece.stop_reason is not None:
                choice.stop_reason = piece.stop_reason
            if self.body.return_token_ids:
                choice.token_ids = piece.token_ids
            self._event(buffer, choice, usage)

    def finish(self, buffer: bytearray) -> None:
        if self.include_usage:
            write_event(buffer, self._envelope("chat.completion.chunk", [], self.generation.usage))
        buffer += b"data: [DONE]\n\n"

    def _event(self, buffer: bytearray, choice: ChatChunkChoice, usage: Any) -> None:
        write_event(buffer, self._envelope("chat.completion.chunk", [choice], usage))

    def _envelope(self, kind: str, choices: Any, usage: Any) -> Envelope:
        return Envelope(self.generation.request_id, kind, self.created, self.model, choices, usage)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        count = self.body.top_logprobs or 0
        return ChatLogprobs(chat_logprobs(self.tokenizer, piece.token_ids, piece.logprobs, count))
