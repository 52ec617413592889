"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.features.call import PromptPart
from quire.sampling_params import SamplingParams
from quire.server.apis.openai.messages import (
    ChatMessageParam,
    ChatToolParam,
    check_continuation,
    template_messages,
)
from quire.server.apis.openai.protocol import MAX_MESSAGES, MAX_TOOLS
from quire.server.chat.dialogue import Dialogue
from quire.server.chat.prompt import render_prompt
from quire.server.chat.prompt_parts import load_parts, place_parts
from quire.server.chat.tools import check_tools
from quire.server.context.request_context import context_of
from quire.server.errors import ApiError
from quire.server.http.bodies import read_body
from quire.server.http.sse import json_response
from quire.server.http.strict_model import Count, Name, StrictModel, TemplateKwargs
from quire.server.state import ServerState, state_of

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

T = TypeVar("T")

_ON_LOOP = 2000
"""Characters or tokens up to which no thread is used."""

_OF_FILES = ("chat_template", "merges_file", "name_or_path", "tokenizer_file", "vocab_file")
"""Settings of tokenizers that name files, or that flags replace."""

_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


Messages = Annotated[
    list[ChatMessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class ConversationFields(StrictModel):
    """Fields of what a chat template renders besides messages."""

    model: Name | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: Annotated[list[ChatToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


def refuse_without_messages(body: ConversationFields) -> None:
    for name in _OF_MESSAGES:
        if getattr(body, name) is not None:
            raise RequestError(f"'{name}' belongs to 'messages'.", param=name)


class ApplyTemplateRequest(ConversationFields):
    """Body of `/apply-template`: a conversation."""

    messages: Messages


class TokenizeRequest(ConversationFields):
    """Body of `/tokenize`: a text, or a conversation.

    `add_special_tokens` holds by default for texts only, as templates write special tokens
    themselves.
    """

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError(
                "one of 'prompt' and 'messages' is needed, and not both.", param="prompt"
            )
        if self.messages is None:
            refuse_without_messages(self)
        return self


class DetokenizeRequest(StrictModel):
    model: Name | None = None
    tokens: Annotated[list[Count], Field(fail_fast=True)]


class Tokenized(msgspec.Struct):
    """Answer of `/tokenize`. `token_strs`: the tokens as the vocabulary writes them."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class AppliedTemplate(msgspec.Struct):
    """Answer of `/apply-template`: the text of the prompt, special tokens included."""

    prompt: str


class Detokenized(msgspec.Struct):
    prompt: str


async def tokenize(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, TokenizeRequest, state.args.max_body_bytes)
    state.check_model(body.model, context_of(request))
    tokenizer = state.tokenizer("prompt" if body.messages is None else "messages")
    if body.messages is None:
        text, special = body.prompt or "", body.add_special_tokens is not False

        def tokenized() -> list[int]:
            ids: list[int] = tokenizer.encode(text, special).tolist()
            return ids

        tokens = await _computed(state, tokenized, len(text))
    else:
        dialogue = rendered_only(state, body, body.messages)
        parts = await load_parts(state, dialogue.parts, context_of(request))

        def conversation() -> list[int]:
            return place_parts(state, _conversation(tokenizer, dialogue, body), parts)[0]

        tokens = await state.count(conversation)
    limit = state.client.config.scheduler.max_model_len

    def answer() -> Response:
        strings = None
        if body.return_token_strs:
            strings = [tokenizer.piece(token) or "" for token in tokens]
        return json_response(Tokenized(len(tokens), limit, tokens, strings))

    return await _computed(state, answer, len(tokens))


async def _computed(state: ServerState, work: Callable[[], T], size: int) -> T:
    """Computes in a thread what takes long. `size`: characters or tokens."""
    return await state.count(work) if size > _ON_LOOP else work()


async def apply_template(request: Request) -> Response:
    """Answers with the text that the chat template makes of a conversation."""
    state = state_of(request)
    body = await read_body(request, ApplyTemplateRequest, state.args.max_body_bytes)
    state.check_model(body.model, context_of(request))
    tokenizer = state.tokenizer("messages")
    dialogue = rendered_only(state, body, body.messages)
    rendered = await asyncio.to_thread(render_prompt, tokenizer, dialogue)
    return json_response(AppliedTemplate(rendered.text))


def rendered_only(
    state: ServerState, body: ConversationFields, messages: list[ChatMessageParam]
) -> Dialogue:
    """Returns a conversation that is only rendered. Raises ApiError for what cannot be."""
    check_continuation(messages, body.continue_final_message, body.add_generation_prompt)
    parts: list[PromptPart] = []
    dialogue = Dialogue(
        messages=template_messages(messages, parts),
        parts=parts,
        params=SamplingParams(),
        tools=[tool.shape for tool in body.tools or ()],
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        request_id="",
    )
    check_tools(dialogue, state.chat_format)
    return dialogue


def _conversation(tokenizer: Tokenizer, dialogue: Dialogue, body: TokenizeRequest) -> list[int]:
    prompt = render_prompt(tokenizer, dialogue)
    if not body.add_special_tokens:
        return prompt.token_ids
    ids: list[int] = tokenizer.encode(prompt.text, add_special_tokens=True).tolist()
    return ids


async def tokenizer_info(request: Request) -> Response:
    """Answers with the tokenizer's settings, and the chat templates that are in use."""
    tokenizer = state_of(request).tokenizer("tokenizer")
    info = {name: value for name, value in tokenizer.config.items() if name not in _OF_FILES}
    templates = tokenizer.chat_templates
    if len(templates) == 1:
        (info["chat_template"],) = templates.values()
    elif templates:
        info["chat_template"] = dict(templates)
    return json_response(info)


async def detokenize(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, DetokenizeRequest, state.args.max_body_bytes)
    state.check_model(body.model, context_of(request))
    tokenizer = state.tokenizer("tokens")
    text = await _computed(state, lambda: _detokenized(tokenizer, body.tokens), len(body.tokens))
    return json_response(Detokenized(text))


def _detokenized(tokenizer: Tokenizer, tokens: list[int]) -> str:
    for place, token in enumerate(tokens):
        if tokenizer.piece(token) is None:
            raise ApiError(
                400,
                f"Invalid value for 'tokens[{place}]': the vocabulary has no token {token}.",
                param=f"tokens[{place}]",
                code="invalid_value",
            )
    return tokenizer.decode(tokens, False)
