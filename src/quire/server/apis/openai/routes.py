"""The routes of OpenAI's API, and those beside it that take its fields."""

from __future__ import annotations

from typing import Any

from quire.server.apis.openai.chat import chat_completions
from quire.server.apis.openai.completions import completions, generate
from quire.server.apis.openai.objects import (
    ChatChoice,
    CompletionChoice,
    CompletionObject,
    GenerateAnswer,
)
from quire.server.apis.openai.protocol import ChatRequest, CompletionRequest, GenerateRequest
from quire.server.apis.openai.stored_chats import (
    ChatList,
    DeletedChat,
    MessageList,
    UpdateRequest,
    delete_chat,
    list_chats,
    list_messages,
    show_chat,
    update_chat,
)
from quire.server.apis.openai.tokenize import (
    AppliedTemplate,
    ApplyTemplateRequest,
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    apply_template,
    detokenize,
    tokenize,
    tokenizer_info,
)
from quire.server.apis.route import EVENTS, PAGE_QUERY, Route

_CHATS = "/v1/chat/completions"
_CHAT = f"{_CHATS}/{{completion_id}}"
_CHAT_ANSWER = CompletionObject[ChatChoice]
_TEXT_ANSWER = CompletionObject[CompletionChoice]

ROUTES = (
    Route("post", "/v1/completions", completions, "Complete text",
          CompletionRequest, _TEXT_ANSWER, EVENTS, counted=True),
    Route("post", _CHATS, chat_completions, "Answer a conversation",
          ChatRequest, _CHAT_ANSWER, EVENTS, counted=True),
    Route("get", _CHATS, list_chats, "Stored chat completions",
          answer=ChatList, query={**PAGE_QUERY, "model": {"type": "string"}}),
    Route("get", _CHAT, show_chat, "A stored chat completion", answer=_CHAT_ANSWER),
    Route("post", _CHAT, update_chat, "Change its metadata", UpdateRequest, _CHAT_ANSWER),
    Route("delete", _CHAT, delete_chat, "Forget it", answer=DeletedChat),
    Route("get", f"{_CHAT}/messages", list_messages, "What it answered",
          answer=MessageList, query=PAGE_QUERY),
    Route("post", "/tokenize", tokenize, "Text or a conversation to tokens",
          TokenizeRequest, Tokenized, counted=True, queued=False),
    Route("post", "/detokenize", detokenize, "Tokens to text",
          DetokenizeRequest, Detokenized, counted=True, queued=False),
    Route("get", "/tokenizer_info", tokenizer_info, "The tokenizer's settings",
          answer=dict[str, Any]),
    Route("post", "/apply-template", apply_template, "A conversation to its prompt",
          ApplyTemplateRequest, AppliedTemplate, counted=True, queued=False),
    Route("post", "/generate", generate, "Complete one prompt",
          GenerateRequest, GenerateAnswer, "text/plain", counted=True),
)  # fmt: skip
