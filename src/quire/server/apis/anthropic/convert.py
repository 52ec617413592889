"""Conversion of Messages API requests to dialogues."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from quire.errors import RequestError
from quire.features.call import PromptPart
from quire.sampling_params import ANTHROPIC, SamplingParams, StructuredOutputsParams
from quire.server.apis.anthropic.protocol import (
    CountTokensRequest,
    ImageBlock,
    MessageParam,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
)
from quire.server.apis.sampling import copied_fields, parameters_of
from quire.server.chat.dialogue import ConversationBuilder, Dialogue, ToolChoice
from quire.server.chat.prompt_parts import add_part, joined
from quire.server.chat.thinking import effort_variables, template_variables, thinking_switch
from quire.server.state import ServerState, new_id

_BETWEEN = "\n\n"
"""Separator of blocks, which are separate pieces of text that often do not end in a space."""

_COPIED = tuple(parameter.name for parameter in parameters_of(ANTHROPIC))

NAMES = {
    "continue_final_message": "messages",
    "structured_outputs": "output_config.format.schema",
    ".function.parameters": ".input_schema",
    ".function": "",
}
"""Maps field names of chat completions, which errors use, to names of this API."""


def messages_of(body: CountTokensRequest, parts: list[PromptPart]) -> list[dict[str, Any]]:
    """Returns the conversation as chat templates take it, with marks for images.

    Results of tools become messages of their own. Consecutive turns of one role become one message.

    Args:
        parts: gets the images.

    Raises:
        RequestError: a result without a call, or a call without a result.
    """
    turns = ConversationBuilder("messages")
    if body.system:
        turns.system(_BETWEEN.join(block.text for block in body.system))
    for place, message in enumerate(body.messages):
        _add(turns, message, f"messages[{place}]", parts)
    return turns.finish()


def _add(
    turns: ConversationBuilder, message: MessageParam, param: str, parts: list[PromptPart]
) -> None:
    if message.role == "system":
        turns.system(_BETWEEN.join(block.text for block in message.content))  # type: ignore[union-attr]
        return
    if not message.content:
        raise RequestError(f"'{param}.content' must not be empty.", param=f"{param}.content")
    for place, block in enumerate(message.content):
        where = f"{param}.content[{place}]"
        if isinstance(block, ThinkingBlock):
            turns.reasoning(block.thinking)
        elif isinstance(block, ToolUseBlock):
            turns.call(block.id, block.name, _json(block.input), f"{where}.id")
        elif isinstance(block, ToolResultBlock):
            text = _result(block, where, parts)
            turns.result(block.tool_use_id, text, f"{where}.tool_use_id")
        elif isinstance(block, TextBlock) and message.role == "assistant":
            turns.assistant(block.text)
        else:
            turns.user(_shown(block, where, parts), merge=True)


def _shown(block: TextBlock | ImageBlock, param: str, parts: list[PromptPart]) -> str:
    """Returns a block's text, or the mark of its image."""
    if isinstance(block, TextBlock):
        return block.text
    return add_part(parts, PromptPart("image", block.source.source, param))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _result(block: ToolResultBlock, param: str, parts: list[PromptPart]) -> str:
    """Returns the result's text. Templates have no place for failed calls, so the text says it."""
    texts = [
        _shown(part, f"{param}.content[{place}]", parts) for place, part in enumerate(block.content)
    ]
    text = functools.reduce(joined, texts, "")
    return f"Error: {text}" if block.is_error else text


def tools_of(tools: list[ToolParam] | None) -> list[dict[str, Any]]:
    """Returns the tools in OpenAI's shape, which chat templates take."""
    out = []
    for tool in tools or ():
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        out.append({"type": "function", "function": function})
    return out


def tool_choice_of(body: CountTokensRequest) -> ToolChoice:
    choice = body.tool_choice
    if choice is None:
        return ToolChoice()
    if choice.name is not None:
        return ToolChoice.named(choice.name)
    return ToolChoice("required" if choice.type == "any" else choice.type)  # type: ignore[arg-type]


def dialogue_of(state: ServerState, body: CountTokensRequest) -> Dialogue:
    """Returns the request's dialogue. A last message of the assistant is continued by the
    answer."""
    parts: list[PromptPart] = []
    messages = messages_of(body, parts)
    last = messages[-1]
    prefilled = last["role"] == "assistant"
    if prefilled and not last["content"].strip():
        raise RequestError(
            "the last message is the assistant's, so it is continued, but it has no text.",
            param=f"messages[{len(body.messages) - 1}].content",
        )
    variables: dict[str, Any] = {}
    known = template_variables(state, "messages", with_tools=bool(body.tools))
    if body.thinking is not None:
        on = body.thinking.type != "disabled"
        variables = thinking_switch(state, known, on=on, param="thinking")
    choice = body.tool_choice
    effort = body.output_config.effort if body.output_config is not None else None
    variables |= effort_variables(state, effort, known, "output_config.effort")
    return Dialogue(
        messages=messages,
        parts=parts,
        params=_params(state, body) if isinstance(body, MessagesRequest) else SamplingParams(),
        tools=tools_of(body.tools),
        tool_choice=tool_choice_of(body),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        template_kwargs=variables,
        continue_final_message=prefilled,
        with_tokens=body.budget is not None,
        request_id=new_id("msg", "_"),
    )


def _params(state: ServerState, body: MessagesRequest) -> SamplingParams:
    format = body.output_config.format if body.output_config is not None else None
    structured = None if format is None else StructuredOutputsParams(json=_json(format.json_schema))
    return SamplingParams(
        **(state.defaults | copied_fields(body, _COPIED)),
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        structured_outputs=structured,
    )
