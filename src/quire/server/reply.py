"""Generates the answer to a `Dialogue`, as batches of events or as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from quire.outputs import Logprob
from quire.server.dialogue import Answer, Dialogue, Event, Finished, TextDelta
from quire.server.errors import ApiError
from quire.server.generation import Generation, Piece, collect
from quire.server.responses import Usage
from quire.server.state import ServerState

if TYPE_CHECKING:
    from quire.engine.tokenizer import Tokenizer


async def prepare(state: ServerState, dialogue: Dialogue) -> Reply:
    """A reply that is ready to start. Raises `ApiError` or `RequestError` naming the field."""
    ids = await count(state, dialogue)
    return Reply(state, dialogue, ids)


async def count(state: ServerState, dialogue: Dialogue) -> list[int]:
    """The prompt's token ids, without running it. Raises as `prepare`."""
    tokenizer = state.tokenizer("messages")
    if dialogue.tools:
        raise ApiError(
            400,
            "'tools' is not supported by this server.",
            param="tools",
            code="unsupported_parameter",
        )
    return await asyncio.to_thread(render_prompt, tokenizer, dialogue)


class Reply:
    """The answer under way; see `Generation` for `start`, `ready`, `close` and `batches`."""

    def __init__(self, state: ServerState, dialogue: Dialogue, prompt: list[int]) -> None:
        self.dialogue = dialogue
        self.request_id = dialogue.request_id
        self.prompt_token_ids = prompt
        self._generation = Generation(
            state.client,
            state.metrics,
            [prompt],
            dialogue.params,
            request_id=dialogue.request_id,
            priority=dialogue.priority,
            cache_salt=dialogue.cache_salt,
        )
        self.start = self._generation.start
        self.ready = self._generation.ready
        self.close = self._generation.close

    async def batches(self) -> AsyncIterator[list[Event]]:
        """The events of what has come in since the last batch; never an empty one."""
        async for pieces in self._generation.batches():
            events: list[Event] = []
            for piece in pieces:
                self._read(piece, events)
            if events:
                yield events

    async def whole(self) -> list[Answer]:
        """Runs it to its end: one answer per choice, in order. Closes the generation."""
        answers = []
        for piece in await collect(self._generation):
            events: list[Event] = []
            self._read(piece, events)
            answer = Answer(piece.choice)
            for event in events:
                answer.add(event)
            answers.append(answer)
        return answers

    @property
    def usage(self) -> Usage:
        return self._generation.usage

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        return self._generation.prompts[0].logprobs

    def _read(self, piece: Piece, events: list[Event]) -> None:
        """Appends the piece's events. Without tools and reasoning its text is passed on unread."""
        text = piece.text
        if text or (piece.token_ids and self.dialogue.with_tokens):
            events.append(TextDelta(piece.choice, text, piece.token_ids, piece.logprobs))
        if piece.finish_reason is not None:
            events.append(Finished(piece.choice, piece.finish_reason, piece.stop_reason))


def render_prompt(tokenizer: Tokenizer, dialogue: Dialogue) -> list[int]:
    """Applies the chat template and tokenizes its text. Runs in a thread.

    The template writes its special tokens itself, so the tokenizer must not add them again. To
    continue the final message, what the template puts after that message's text is cut off.
    """
    add = dialogue.add_generation_prompt and not dialogue.continue_final_message
    text = tokenizer.apply_chat_template(
        dialogue.messages, add_generation_prompt=add, **dialogue.template_kwargs
    )
    if dialogue.continue_final_message:
        final = dialogue.messages[-1]["content"].strip()
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
