"""Chunks of a streamed completion, as `stream_options` asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from quire.server.apis.openai.objects import CompletionObject
from quire.server.apis.openai.protocol import StreamOptions
from quire.server.chat.text import CompletionUsage
from quire.server.http.sse import pad_event, write_data, write_event


class ChunkWriter:
    """Writes the chunks of one answer.

    Args:
        envelope: makes a chunk of its choices and its `usage` field.
        usage: returns the token counts so far.
    """

    def __init__(
        self,
        options: StreamOptions | None,
        envelope: Callable[[list[Any], Any], CompletionObject[Any]],
        usage: Callable[[], CompletionUsage],
    ) -> None:
        options = options or StreamOptions()
        self._envelope = envelope
        self._usage = usage
        self._at_end = bool(options.include_usage or options.continuous_usage_stats)
        self._always = bool(options.continuous_usage_stats)
        self._obfuscate = bool(options.include_obfuscation)

    def write(
        self, buffer: bytearray, choice: Any, prompt_token_ids: list[int] | UnsetType = UNSET
    ) -> None:
        """Writes one choice's chunk.

        `usage` is null before the last chunk where the client asked for it there, and absent where
        it did not.
        """
        usage = self._usage() if self._always else None if self._at_end else UNSET
        envelope = self._envelope([choice], usage)
        envelope.prompt_token_ids = prompt_token_ids
        if self._obfuscate:
            write_data(buffer, pad_event(msgspec.json.encode(envelope)))
        else:
            write_event(buffer, envelope)

    def finish(self, buffer: bytearray) -> None:
        if self._at_end:
            write_event(buffer, self._envelope([], self._usage()))
        write_data(buffer, b"[DONE]")
