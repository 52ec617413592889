"""Conversion of Responses API requests to dialogues."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from quire.features.call import PromptPart
from quire.sampling_params import RESPONSES, SamplingParams, StructuredOutputsParams
from quire.server.apis.openai.convert import check_logprobs, usual_room
from quire.server.apis.responses.items import (
    CallItem,
    CallOutputItem,
    CompactionItem,
    CustomToolCallItem,
    FunctionCallItem,
    Item,
    ItemImage,
    ItemReference,
    ItemText,
    MessageItem,
    ReasoningItem,
    Response,
    ToolSearchOutputItem,
    shown,
)
from quire.server.apis.responses.protocol import (
    LOGPROBS,
    AllowedTools,
    CreateRequest,
    NamedTool,
    PromptFields,
    TextConfig,
)
from quire.server.apis.responses.store import ResponseSource
from quire.server.apis.responses.tools import (
    TOOL_SEARCH,
    CustomTool,
    ModelTool,
    flat_name,
    model_tools,
    shown_tool,
    tool_shape,
)
from quire.server.apis.sampling import copied_fields, parameters_of
from quire.server.chat.custom_tools import input_arguments
from quire.server.chat.dialogue import ConversationBuilder, Dialogue, ToolChoice
from quire.server.chat.prompt_parts import add_part
from quire.server.chat.sealed import seal
from quire.server.chat.thinking import effort_variables, template_variables
from quire.server.context.hints import decline, refuses_hints
from quire.server.errors import ApiError, unsupported_error
from quire.server.state import ServerState, new_id

_ID_PREFIX = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "compaction": "cmp",
    "reasoning": "rs",
}
_COPIED = tuple(parameter.name for parameter in parameters_of(RESPONSES))


_SUMMARIZE = (
    "Summarize this conversation, so that the work can go on without it. Tell what the user wants, "
    "what was decided and done, names of files and commands, results of tools that still matter, "
    "open problems and the next step. Answer with the summary alone."
)
_SUMMARY = "Earlier turns of this conversation were summarized:"
"""The text before the summary of a `compaction` item."""

NAMES = {
    "messages": "input",
    "structured_outputs": "text.format.schema",
    ".function": "",
}
"""Maps field names of chat completions, which errors use, to names of this API."""


def items_of(body: PromptFields, store: ResponseSource, owner: bytes) -> tuple[Item, ...]:
    """Returns all items that the response answers, each with an id: earlier turns, then the input.

    Raises:
        ApiError: 404 where a response or an item is not in the store.
    """
    before: tuple[Item, ...] = ()
    if body.previous_response_id is not None:
        stored = store.get(body.previous_response_id, "previous_response_id", owner)
        if stored.running:
            raise ApiError(
                400,
                f"'previous_response_id': the response '{stored.response.id}' is still running.",
                param="previous_response_id",
            )
        before = stored.history
    return (
        *before,
        *(_resolved(item, place, store, owner) for place, item in enumerate(body.input)),
    )


def _resolved(item: Item | ItemReference, place: int, store: ResponseSource, owner: bytes) -> Item:
    if isinstance(item, ItemReference):
        found = store.item(item.id, owner)
        if found is None:
            raise ApiError(404, f"Item with id '{item.id}' not found.", param=f"input[{place}].id")
        return found
    if item.id is None:
        return item.model_copy(update={"id": new_id(_ID_PREFIX[item.type], "_")})
    return item


def messages_of(
    body: PromptFields, items: Sequence[Item], parts: list[PromptPart]
) -> list[dict[str, Any]]:
    """Returns the conversation as chat templates take it, with marks for images.

    Args:
        items: the whole conversation. The last items are the body's own.
        parts: gets the images.
    """
    turns = ConversationBuilder("input")
    if body.instructions is not None:
        turns.system(body.instructions)
    earlier = len(items) - len(body.input)
    for place, item in enumerate(items, -earlier):
        own = f"input[{place}]" if place >= 0 else ""
        where = f"{own}.call_id" if own else "previous_response_id"
        if isinstance(item, CallItem):
            turns.call(item.call_id, *_called(item), where)
        elif isinstance(item, CallOutputItem):
            turns.result(item.call_id, _output_text(item, own, parts), where)
        elif isinstance(item, ReasoningItem):
            turns.reasoning(item.text)
        elif isinstance(item, CompactionItem):
            turns.user(f"{_SUMMARY}\n\n{item.text}")
        elif item.role == "assistant":
            turns.assistant(item.text)
        elif item.role == "user":
            turns.user(_marked(item.content, own and f"{own}.content", parts))
        else:
            turns.system(item.text)
    return turns.finish()


def _output_text(item: CallOutputItem, own: str, parts: list[PromptPart]) -> str:
    if isinstance(item, ToolSearchOutputItem):
        return item.text
    return _marked(item.output, own and f"{own}.output", parts)


def _marked(content: Sequence[ItemText | ItemImage], param: str, parts: list[PromptPart]) -> str:
    """Returns a text with a mark for each image.

    Args:
        param: the content's field; "" for an earlier turn's.
        parts: gets the images.
    """
    text = ""
    for place, part in enumerate(content):
        if isinstance(part, ItemText):
            text += part.text
        else:
            where = f"{param}[{place}]" if param else "previous_response_id"
            text += add_part(parts, PromptPart("image", part.source, where, part.detail or "auto"))
    return text


def compacting(items: Sequence[Item]) -> tuple[Item, ...]:
    """Returns the conversation with the request to summarize it."""
    part = ItemText(type="input_text", text=_SUMMARIZE, logprobs=None)
    return (*items, MessageItem(type="message", role="user", content=[part]))


def compacted(items: Sequence[Item], summary: str) -> list[dict[str, Any]]:
    """Returns the items that replace a conversation: its user messages, and the summary."""
    kept = [shown(item) for item in items if isinstance(item, MessageItem) and item.role == "user"]
    sealed = seal("compaction", summary)
    last = {"id": new_id("cmp", "_"), "type": "compaction", "encrypted_content": sealed}
    return [*kept, last]


def _called(item: CallItem) -> tuple[str, str]:
    """Returns the name by which the model knows the called tool, and the arguments' JSON text."""
    if isinstance(item, FunctionCallItem):
        return flat_name(item.namespace, item.name), item.arguments
    if isinstance(item, CustomToolCallItem):
        return flat_name(item.namespace, item.name), input_arguments(item.input)
    return TOOL_SEARCH, item.text


def tools_of(
    body: PromptFields, items: Sequence[Item]
) -> tuple[list[tuple[str | None, ModelTool]], list[tuple[str | None, ModelTool]]]:
    """Returns the request's tools, and those that searches found, each with its namespace.

    The prompt shows found tools where they were found, so that its beginning stays the same.
    """
    given = list(model_tools(body.tools))
    names = {flat_name(namespace, tool.name) for namespace, tool in given}
    found = []
    for item in items:
        for namespace, tool in model_tools(
            item.tools if isinstance(item, ToolSearchOutputItem) else ()
        ):
            name = flat_name(namespace, tool.name)
            if name not in names:
                names.add(name)
                found.append((namespace, tool))
    return given, found


def dialogue_of(state: ServerState, body: PromptFields, items: Sequence[Item]) -> Dialogue:
    variables = dict(body.chat_template_kwargs or {})
    known = template_variables(state, "input", with_tools=bool(body.tools))
    variables |= effort_variables(state, body.effort, known, "reasoning.effort")
    verbosity = body.text.verbosity if body.text is not None else None
    if verbosity is not None and "verbosity" in known:
        variables["verbosity"] = verbosity
    elif verbosity not in (None, "medium"):
        if refuses_hints():
            raise unsupported_error("text.verbosity", "has no place in the model's chat template")
        decline("text.verbosity")
    logprobs = isinstance(body, CreateRequest) and LOGPROBS in (body.include or ())
    params = SamplingParams(**dict[str, Any](state.defaults))
    if isinstance(body, CreateRequest):
        params = _params(state, body)
    most = state.client.config.scheduler.max_model_len
    check_logprobs(params, 1, most, "top_logprobs", ("max_output_tokens",))
    given, found = tools_of(body, items)
    parts: list[PromptPart] = []
    dialogue = Dialogue(
        messages=messages_of(body, items, parts),
        parts=parts,
        params=params,
        default_max_tokens=usual_room(params, most),
        tools=[tool_shape(tool, namespace) for namespace, tool in (*given, *found)],
        custom_tools=frozenset(
            flat_name(namespace, tool.name)
            for namespace, tool in (*given, *found)
            if isinstance(tool, CustomTool)
        ),
        found_tools=frozenset(flat_name(namespace, tool.name) for namespace, tool in found),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        template_kwargs=variables,
        with_tokens=logprobs,
        request_id=new_id("resp", "_"),
    )
    if isinstance(body, CreateRequest):
        dialogue.priority = body.priority or 0
        dialogue.cache_salt = body.cache_salt or ""
    return dialogue


def _params(state: ServerState, body: CreateRequest) -> SamplingParams:
    return SamplingParams(
        **(state.defaults | copied_fields(body, _COPIED)),
        max_tokens=body.max_output_tokens,
        stop=tuple(body.stop or ()),
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()} or None,
        logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None,
        structured_outputs=_structured(body.text),
    )


def _structured(text: TextConfig | None) -> StructuredOutputsParams | None:
    format = text.format if text is not None else None
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(json=msgspec.json.encode(format.json_schema).decode())


def _tool_choice(choice: str | NamedTool | AllowedTools | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if isinstance(choice, NamedTool):
        return ToolChoice.named(flat_name(choice.namespace, choice.name))
    if isinstance(choice, AllowedTools):
        return ToolChoice(
            choice.mode, tuple(flat_name(tool.namespace, tool.name) for tool in choice.tools)
        )
    return ToolChoice(choice)  # type: ignore[arg-type]


def without_oldest(items: Sequence[Item], count: int) -> tuple[Item, ...]:
    """Returns the items without the oldest `count` turns.

    A turn begins with a user's message. System messages stay; results of removed calls do not.
    """
    if count == 0:
        return tuple(items)
    kept: list[Item] = []
    calls: set[str] = set()
    turn = 0
    for item in items:
        if isinstance(item, MessageItem) and item.role == "user":
            turn += 1
        if isinstance(item, MessageItem) and item.role in ("system", "developer"):
            kept.append(item)
        elif turn > count and not _orphan(item, calls):
            kept.append(item)
            if isinstance(item, CallItem):
                calls.add(item.call_id)
    return tuple(kept)


def _orphan(item: Item, calls: set[str]) -> bool:
    return isinstance(item, CallOutputItem) and item.call_id not in calls


def turns_in(items: Sequence[Item]) -> int:
    return sum(isinstance(item, MessageItem) and item.role == "user" for item in items)


def response_of(
    state: ServerState, body: CreateRequest, dialogue: Dialogue, adapter: str
) -> Response:
    """Returns the response before it has output, echoing its request."""
    text: dict[str, Any] = {"format": {"type": "text"}}
    if body.text is not None:
        text |= body.text.model_dump(exclude_none=True, by_alias=True)
    choice = body.tool_choice or "auto"
    tools = [shown_tool(tool) for tool in body.tools or ()]
    return Response(
        id=dialogue.request_id,
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=adapter or state.model_name,
        output=[],
        parallel_tool_calls=dialogue.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=UNSET if body.prompt_cache_key is None else body.prompt_cache_key,
        reasoning={"effort": body.effort, "summary": None},
        safety_identifier=UNSET if body.safety_identifier is None else body.safety_identifier,
        store=stores(state, body),
        temperature=dialogue.params.temperature,
        text=text,
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
        tools=tools,
        top_logprobs=body.top_logprobs or 0,
        top_p=dialogue.params.top_p,
        truncation=body.truncation or "disabled",
        user=UNSET if body.user is None else body.user,
    )


def stores(state: ServerState, body: CreateRequest) -> bool:
    return body.store is not False and state.args.response_store_size > 0
