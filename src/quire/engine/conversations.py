"""Conversations of `LLM`'s callers as prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.engine.prompt_inputs import Prompt
from quire.errors import RequestError
from quire.text.tokenizer import Tokenizer

_OWN = ("self", "messages", "add_generation_prompt", "chat_template")


def chat_prompts(
    tokenizer: Tokenizer,
    messages: object,
    add_generation_prompt: bool,
    chat_template: str | None,
    variables: Mapping[str, Any],
) -> list[Prompt]:
    """Returns the prompts of one conversation or many. variables: further ones of the template.

    Raises:
        RequestError: they are no conversations, the template refuses one, or a variable is one that
            it is given anyway.
    """
    for name in variables:
        if name in _OWN or name in tokenizer.special_tokens:
            raise RequestError(
                f"{name!r} cannot be set through chat_template_kwargs", "chat_template_kwargs"
            )
    prompts: list[Prompt] = []
    for conversation in as_conversations(messages):
        text = tokenizer.apply_chat_template(
            conversation,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            **variables,
        )
        # The template has written the special tokens.
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append({"prompt": text, "prompt_token_ids": ids})
    return prompts


def as_conversations(messages: object) -> list[Sequence[Mapping[str, Any]]]:
    """Returns one conversation or several as a list. Raises RequestError where they are neither."""
    if _all(Mapping, messages):
        return [messages]  # type: ignore[list-item]
    if isinstance(messages, list | tuple) and all(_all(Mapping, each) for each in messages):
        return list(messages)
    raise RequestError("a conversation is a list of dicts with role and content", "messages")


def _all(kind: type, items: object) -> bool:
    return (
        isinstance(items, list | tuple) and bool(items) and all(isinstance(i, kind) for i in items)
    )
