"""Conversion of Ollama's requests to dialogues, prompts and sampling parameters."""

from __future__ import annotations

import json
from typing import Any

from quire.features.call import PromptPart
from quire.sampling_params import OLLAMA, SamplingParams, StructuredOutputsParams
from quire.server.apis.ollama.protocol import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaRequest,
)
from quire.server.apis.openai.convert import check_logprobs, usual_room
from quire.server.apis.sampling import copied_fields, parameters_of
from quire.server.chat.dialogue import Dialogue
from quire.server.chat.prompt_parts import add_part
from quire.server.chat.thinking import effort_variables, template_variables, thinking_switch
from quire.server.state import ServerState, new_id

TAG = ":latest"
"""Ollama's clients add this tag to names without one."""

_COPIED = tuple(parameter.name for parameter in parameters_of(OLLAMA))

NAMES = {
    "structured_outputs": "format",
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
    **{name: f"options.{name}" for name in (*_COPIED, "stop")},
}
"""Maps names of `SamplingParams`, which errors use, to names of this API."""


def model_name(name: str, state: ServerState) -> str:
    """Returns a model's name without Ollama's default tag."""
    bare = name.removesuffix(TAG)
    return bare if name != bare and not state.is_served(name) else name


def params_of(state: ServerState, body: OllamaRequest) -> SamplingParams:
    """Returns the sampling parameters.

    Raises:
        RequestError: a value is out of bounds; names its field.
    """
    options, limit = body.options, None
    fields: dict[str, Any] = dict(state.defaults)
    if options is not None:
        fields |= copied_fields(options, _COPIED)
        if options.seed is not None and options.seed < 0:
            fields.pop("seed")
        if options.repeat_penalty is not None:
            fields["repetition_penalty"] = options.repeat_penalty
        if options.stop:
            fields["stop"] = tuple(options.stop)
        limit = options.num_predict if (options.num_predict or 0) > 0 else None
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    if body.format == "json":
        fields["structured_outputs"] = StructuredOutputsParams(json_object=True)
    elif isinstance(body.format, dict):
        fields["structured_outputs"] = StructuredOutputsParams(json=json.dumps(body.format))
    return SamplingParams(**fields, max_tokens=limit)


def chat_dialogue(state: ServerState, body: OllamaChatRequest) -> Dialogue:
    """Returns the dialogue of `/api/chat`."""
    tools = [
        {"type": "function", "function": tool.function.model_dump(exclude_none=True)}
        for tool in body.tools or ()
    ]
    parts: list[PromptPart] = []
    return _dialogue(state, body, messages_of(body.messages, parts), tools, parts)


def generate_dialogue(state: ServerState, body: OllamaGenerateRequest) -> Dialogue:
    """Returns the dialogue of one prompt of `/api/generate`."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    parts: list[PromptPart] = []
    content = _marked(body.images, "images", parts) + body.prompt
    messages = [*system, {"role": "user", "content": content}]
    dialogue = _dialogue(state, body, messages, [], parts)
    dialogue.with_tokens = True  # for `context`
    return dialogue


def _dialogue(
    state: ServerState,
    body: OllamaRequest,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    parts: list[PromptPart],
) -> Dialogue:
    params, most = params_of(state, body), state.client.config.scheduler.max_model_len
    check_logprobs(params, 1, most, "top_logprobs", ("options.num_predict",))
    variables: dict[str, Any] = {}
    if body.think is not None:
        known = template_variables(state, "messages", with_tools=bool(tools))
        if isinstance(body.think, bool):
            variables = thinking_switch(state, known, on=body.think, param="think")
        else:
            variables = effort_variables(state, body.think, known, "think")
    return Dialogue(
        messages=messages,
        parts=parts,
        params=params,
        default_max_tokens=usual_room(params, most),
        tools=tools,
        template_kwargs=variables,
        with_tokens=bool(body.logprobs),
        request_id=new_id("ollama"),
    )


def _marked(images: list[str] | None, param: str, parts: list[PromptPart]) -> str:
    """Returns the marks of images, which come before a message's text."""
    return "".join(
        add_part(parts, PromptPart("image", image, f"{param}[{place}]"))
        for place, image in enumerate(images or ())
    )


def messages_of(messages: list[OllamaMessage], parts: list[PromptPart]) -> list[dict[str, Any]]:
    """Returns the messages in the shape that chat templates take, with marks for images.

    Ollama's calls need no ids. A result without one answers the first open call of its tool, or
    the first open call.

    Args:
        parts: gets the images.
    """
    shaped: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # id and tool of each call without a result
    count = 0
    for place, message in enumerate(messages):
        text = _marked(message.images, f"messages[{place}].images", parts) + (message.content or "")
        out: dict[str, Any] = {"role": message.role, "content": text}
        if message.thinking:
            out["reasoning_content"] = message.thinking
        calls = []
        for call in message.tool_calls or ():
            id = call.id or f"call_{count}"
            count += 1
            function = {
                "name": call.function.name,
                "arguments": json.dumps(call.function.arguments, ensure_ascii=False),
            }
            calls.append({"id": id, "type": "function", "function": function})
            open_calls.append((id, call.function.name))
        if calls:
            out["tool_calls"] = calls
        if message.role == "tool":
            name = message.tool_name or message.name
            out["tool_call_id"] = _answered(open_calls, message.tool_call_id, name)
            if name:
                out["name"] = name
        shaped.append(out)
    return shaped


def _answered(open_calls: list[tuple[str, str]], id: str | None, name: str | None) -> str:
    """Removes the call that a result answers from the open ones, and returns its id."""
    found = [call for call in open_calls if call[0] == id] if id else []
    found = found or [call for call in open_calls if call[1] == name] or open_calls
    if not found:
        return id or "call"
    answered = found[0]
    open_calls.remove(answered)
    return id or answered[0]
