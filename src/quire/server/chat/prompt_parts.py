"""Parts of messages that are no text, from an API's body to a prompt.

Until a prompt is rendered, a mark in a message's text stands for such a part. So everything that
joins or moves texts keeps the parts at their places.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.arrays import int32
from quire.features.call import PromptInputs, PromptPart
from quire.server.errors import ApiError

if TYPE_CHECKING:
    from quire.server.context.request_context import RequestContext
    from quire.server.state import ServerState

_SEPARATOR = "\n\n"
# A random text, so that no client can write a mark.
_NONCE = uuid.uuid4().hex
_BEGIN, _END = f"<part {_NONCE} ", f" {_NONCE}>"
_MARK = re.compile(f"{_BEGIN}([0-9]+){_END}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of `/v1/files` as the source of a part."""

    id: str


def add_part(parts: list[PromptPart], part: PromptPart) -> str:
    """Appends a part, and returns the mark that stands for it in a message's text."""
    parts.append(part)
    return f"{_BEGIN}{len(parts) - 1}{_END}"


def joined(before: str, text: str) -> str:
    """Joins two texts of a message. Next to a part nothing separates them."""
    if not before or not text or before.endswith(_END) or text.startswith(_BEGIN):
        return before + text
    return before + _SEPARATOR + text


def content_of(text: str, parts: Sequence[PromptPart]) -> str | list[dict[str, Any]]:
    """Returns a message's content as chat templates take it: a list if it has parts."""
    pieces = _MARK.split(text)
    if len(pieces) == 1:
        return text
    content: list[dict[str, Any]] = []
    for place, piece in enumerate(pieces):
        if place % 2:
            content.append({"type": parts[int(piece)].kind})
        elif piece:
            content.append({"type": "text", "text": piece})
    return content


def template_contents(
    messages: Sequence[dict[str, Any]], parts: Sequence[PromptPart]
) -> list[dict[str, Any]]:
    """Returns messages with parts in place of marks."""
    return [
        {**message, "content": content_of(message["content"], parts)}
        if message.get("content")
        else message
        for message in messages
    ]


def shown_messages(
    messages: Sequence[dict[str, Any]], parts: Sequence[PromptPart]
) -> list[dict[str, Any]]:
    """Returns messages as a client has sent them, in OpenAI's shape."""
    if not parts:
        return list(messages)
    shown = []
    for message in messages:
        content = content_of(message.get("content") or "", parts)
        if isinstance(content, list):
            places = map(int, _MARK.findall(message["content"]))
            content = [
                part if part["type"] == "text" else _shown(parts[next(places)]) for part in content
            ]
            message = {**message, "content": content}
        shown.append(message)
    return shown


def _shown(part: PromptPart) -> dict[str, Any]:
    if part.kind == "video":
        return {"type": "video_url", "video_url": {"url": part.source}}
    return {"type": "image_url", "image_url": {"url": part.source, "detail": part.detail}}


async def load_parts(
    state: ServerState, parts: Sequence[PromptPart], context: RequestContext
) -> Sequence[Any]:
    """Reads the parts of a request, off the event loop. The request's end closes them.

    Raises:
        RequestError: a part cannot be used; names its field.
        ApiError: 404, the request's key has no such file.
    """
    if not parts:
        return ()
    reader = await asyncio.to_thread(lambda: state.client.prompt_reader)
    if reader is None:
        raise ApiError(
            400,
            f"Invalid value for '{parts[0].param}': images are not supported.",
            param=parts[0].param,
            code="unsupported_parameter",
        )
    owner = context.key.digest
    loaded = await reader.load([_with_path(state, part, owner) for part in parts])
    context.closing += [part.close for part in loaded]
    return loaded


def _with_path(state: ServerState, part: PromptPart, owner: bytes) -> PromptPart:
    """Returns a part with the path of its file of `/v1/files`, if it names one."""
    if not isinstance(part.source, StoredFile):
        return part
    if state.file_path is None:
        raise ApiError(
            404,
            "This server keeps no files (see --batch-dir).",
            param=part.param,
            code="no_batch_dir",
        )
    return replace(part, source=state.file_path(part.source.id, owner, part.param))


def place_parts(
    state: ServerState, token_ids: list[int], loaded: Sequence[Any]
) -> tuple[list[int], PromptInputs | None]:
    """Returns a prompt with room for its parts, and the parts. May take long.

    Raises:
        RequestError: the prompt has not one place for each part.
    """
    reader = state.client.prompt_reader
    if not loaded or reader is None:
        return token_ids, None
    ids, inputs = reader.place(int32(token_ids), loaded)
    placed: list[int] = ids.tolist()
    return placed, inputs
