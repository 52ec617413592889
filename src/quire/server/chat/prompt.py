"""Renders a dialogue's messages to the text and the token ids of a prompt."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.features.call import PromptInputs
from quire.server.chat.dialogue import Dialogue
from quire.server.chat.prompt_parts import template_contents
from quire.server.context.hints import decline, refuses_hints
from quire.server.errors import ApiError
from quire.server.http.strict_model import cut_prompt
from quire.server.parsers.registry import tool_parser
from quire.text.chat_template import ChatTemplate
from quire.text.template_traits import named_id

if TYPE_CHECKING:
    from quire.server.parsers.stream import ToolParser
    from quire.text.chat_template import TemplateTraits
    from quire.text.tokenizer import Tokenizer

_FIELDS = ("documents", "reasoning_effort", "verbosity")
"""Template variables that are also fields of requests."""
_FOLDED_KEY = "folded"
"""Marks a user's message that contains a system message, until all messages are folded."""
_MARK = "~end-of-what-is-to-be-continued~"


@dataclass(slots=True)
class RenderedPrompt:
    """A rendered prompt.

    Attributes:
        continued: text of the final message if the model is to continue it.
        inputs: the prompt's parts that are no text, once they have room among its tokens.
    """

    text: str
    token_ids: list[int]
    continued: str | None = None
    inputs: PromptInputs | None = None


def render_prompt(
    tokenizer: Tokenizer, dialogue: Dialogue, most: int | None = None
) -> RenderedPrompt:
    """Applies the chat template and tokenizes its text. Runs in a thread.

    The template writes special tokens itself, so the tokenizer does not add them. If the model is
    to continue the final message, the template's text after that message is cut off.

    Args:
        most: most tokens. A text that is too long for them is refused before it is tokenized.

    Raises:
        ApiError, RequestError: the template does not support something in the dialogue.
    """
    template = _templates(tokenizer, dialogue)
    tools = _tools_for_template(tokenizer, dialogue, template)
    variables = _variables(dialogue, template, bool(tools))
    messages = _messages(tokenizer, dialogue, template, bool(tools))
    if tools:
        variables["tools"] = tools
    add = dialogue.add_generation_prompt and not dialogue.continue_final_message
    if dialogue.continue_final_message:
        messages = _add_mark(messages)
    if dialogue.parts:
        messages = template_contents(messages, dialogue.parts)
    if dialogue.chat_template is None:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=add, **variables)
    else:
        variables = tokenizer.special_tokens | variables
        text = template(bool(tools)).render(messages, add_generation_prompt=add, **variables)
    continued = None
    if dialogue.continue_final_message:
        text = _cut_at_mark(text)
        continued = dialogue.messages[-1]["content"]
    if dialogue.memo is not None:
        return RenderedPrompt(text, dialogue.memo.encode(tokenizer, text, most), continued)
    keep = dialogue.most_prompt_tokens
    if keep is not None and dialogue.parts:
        raise ApiError(
            400,
            "'truncate_prompt_tokens' is not supported for prompts with images.",
            param="truncate_prompt_tokens",
            code="unsupported_parameter",
        )
    limit = most if keep is None else None
    ids: list[int] = tokenizer.encode(text, dialogue.add_special_tokens, limit).tolist()
    return RenderedPrompt(text, cut_prompt(ids, keep, dialogue.truncation_side), continued)


Templates = Callable[[bool], ChatTemplate]
"""Returns the chat template for a conversation with tools (True) or without (False)."""


def _templates(tokenizer: Tokenizer, dialogue: Dialogue) -> Templates:
    """Returns the model's templates, or the request's own template.

    Raises:
        RequestError: the request's template is invalid.
    """
    if dialogue.chat_template is None:
        return tokenizer.template
    # A request's template is not cached, because such templates would evict the model's.
    own = ChatTemplate(dialogue.chat_template)
    return lambda with_tools: own


def _tools_for_template(
    tokenizer: Tokenizer, dialogue: Dialogue, template: Templates
) -> list[dict[str, Any]]:
    """Returns the tools to pass to the template.

    If the model chooses freely, only the tools that it may call are passed. A tool without
    parameters gets an empty schema. `strict` is left out, because no model was trained on it.
    """
    choice = dialogue.tool_choice
    if choice.mode == "none" or not dialogue.tools:
        return []
    hidden = dialogue.found_tools
    traits = tokenizer.traits(template(True))
    if not traits.shows_tools:
        raise _not_shown_error("tools", "tools", traits)
    shown = []
    for tool in dialogue.tools:
        function = {name: value for name, value in tool["function"].items() if name != "strict"}
        function.setdefault("parameters", {"type": "object", "properties": {}})
        if traits.needs_description:
            function.setdefault("description", "")
        name, every = function["name"], choice.mode == "required" or choice.names is None
        if name not in hidden and (every or name in (choice.names or ())):
            shown.append({"type": "function", "function": function})
    return shown


def _variables(dialogue: Dialogue, template: Templates, with_tools: bool) -> dict[str, Any]:
    """Returns the dialogue's template variables that the template uses.

    A variable that the template does not use is declined as a hint. Documents are not a hint,
    because the answer depends on them: without a place for them the request is refused.
    """
    variables = dict(dialogue.template_kwargs)
    if not variables:
        return variables
    known = template(with_tools).variables
    for name in [name for name in variables if name not in known]:
        param = name if name in _FIELDS else "chat_template_kwargs"
        if name == "documents" or refuses_hints():
            raise ApiError(
                400,
                f"'{param}': the model's chat template does not use '{name[:100]}'.",
                param=param,
                code="unsupported_parameter",
            )
        decline(param, param if param == name else f"{param}.{name[:100]}")
        del variables[name]
    return variables


def _messages(
    tokenizer: Tokenizer, dialogue: Dialogue, template: Templates, with_tools: bool
) -> list[dict[str, Any]]:
    """Returns the messages, with tool calls and system messages in the template's shape."""
    messages = dialogue.messages
    has_calls = any(message.get("tool_calls") for message in messages)
    has_late_system = any(
        message["role"] == "system" and before["role"] != "system"
        for before, message in itertools.pairwise(messages)
    )
    if not has_calls and not has_late_system:
        return messages
    traits = tokenizer.traits(template(with_tools))
    if has_late_system and not traits.late_system:
        messages = _fold_late_system(messages)
    if not has_calls:
        return messages
    if not traits.shows_calls:
        parser = tool_parser("auto", None, template(with_tools).source)
        if parser is None or traits.error is not None:
            raise _not_shown_error("tool calls", "messages", traits)
        return [_write_calls(message, parser) for message in messages]
    if traits.ids_name_tools:
        messages = _rename_call_ids(messages)
    return [
        _format_calls(message, traits) if message.get("tool_calls") else message
        for message in messages
    ]


def _fold_late_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Moves the text of system messages that follow other messages into users' messages."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system" and any(each["role"] != "system" for each in out):
            message = {"role": "user", "content": message.get("content") or ""}
        elif message["role"] != "user" or not out or not out[-1].get(_FOLDED_KEY):
            out.append(message)
            continue
        if out[-1]["role"] == "user":
            text = f"{out[-1].get('content') or ''}\n\n{message.get('content') or ''}"
            out[-1] = {**out[-1], "content": text, _FOLDED_KEY: True}
        else:
            out.append({**message, _FOLDED_KEY: True})
    return [{name: each[name] for name in each if name != _FOLDED_KEY} for each in out]


def _rename_call_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gives calls and their results new ids that contain the tool's name."""
    ids: dict[str, str] = {}
    out, number = [], 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            ids[call["id"]] = named_id(call["function"]["name"], number)
            calls.append({**call, "id": ids[call["id"]]})
            number += 1
        if calls:
            message = {**message, "tool_calls": calls}
        elif message.get("tool_call_id") in ids:
            message = {**message, "tool_call_id": ids[message["tool_call_id"]]}
        out.append(message)
    return out


def _not_shown_error(what: str, param: str, traits: TemplateTraits) -> ApiError:
    why = "" if traits.error is None else f" ({traits.error})"
    return ApiError(
        400,
        f"The model's chat template does not show {what} to the model{why}. Start the server with "
        "a --chat-template that does.",
        param=param,
        code="unsupported_parameter",
    )


def _format_calls(message: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if not traits.arguments_as_text:
            function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    content = message.get("content") or traits.empty_content
    return {**message, "content": content, "tool_calls": calls}


def _write_calls(message: dict[str, Any], parser: type[ToolParser]) -> dict[str, Any]:
    """Returns a message with its calls in its content, for a template that shows only content."""
    content = message.get("content") or ""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    if functions:
        content += parser.write([(f["name"], json.loads(f["arguments"])) for f in functions]) or ""
    fields = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**fields, "content": content}


def _add_mark(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with a mark after the final message's text."""
    final = messages[-1]
    if not (final.get("content") or "").strip():
        raise ApiError(
            400,
            "'continue_final_message': the final message has no content to be continued.",
            param="continue_final_message",
        )
    return [*messages[:-1], {**final, "content": f"{final['content']}{_MARK} "}]


def _cut_at_mark(text: str) -> str:
    """Returns the text before the mark.

    If the space after the mark is gone, the template trims messages. Then the text is trimmed too.
    """
    before, mark, behind = text.rpartition(_MARK)
    if not mark:
        raise ApiError(
            400,
            "'continue_final_message': the chat template leaves the final message out.",
            param="continue_final_message",
        )
    return before if behind.startswith(" ") else before.rstrip()
