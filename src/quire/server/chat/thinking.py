"""Turns a model's thinking on or off, and bounds its length."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from msgspec import UnsetType
from msgspec.structs import replace as replace_params

from quire.server.chat.dialogue import ChatEvent, Finished, ReasoningDelta
from quire.server.chat.generation import ChatGeneration
from quire.server.chat.prompt import RenderedPrompt
from quire.server.chat.text import CompletionTokensDetails, CompletionUsage
from quire.server.context.hints import decline, refuses_hints
from quire.server.errors import unsupported_error
from quire.server.state import ServerState

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

_SWITCHES = ("enable_thinking", "thinking")
"""Names that chat templates use for the variable that turns thinking on and off."""


def template_variables(state: ServerState, param: str, *, with_tools: bool) -> frozenset[str]:
    """Returns the names of the variables that the chat template uses.

    Raises:
        ApiError: the server has no tokenizer; the error names `param`.
    """
    return state.tokenizer(param).template(with_tools).variables


def effort_variables(
    state: ServerState, effort: str | None, known: frozenset[str], param: str
) -> dict[str, Any]:
    """Returns the variables that pass a reasoning effort to the chat template.

    A template without the variable `reasoning_effort` may have a switch for thinking. For the
    effort "none" the switch is turned off. Any other effort has no place in such a template, and is
    declined as a hint.

    Args:
        effort: the requested effort; None for no request.
        known: the variables that the template uses.
        param: name of the request's field, for the error.

    Raises:
        ApiError: the effort has no place in the template, and the server refuses hints.
    """
    if effort is None:
        return {}
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    ignored = state.args.ignore_reasoning_effort
    if effort == "none" and not (ignored and known.isdisjoint(_SWITCHES)):
        return thinking_switch(state, known, on=False, param=param)
    if ignored:
        return {}
    if not refuses_hints():
        decline(param)
        return {}
    raise unsupported_error(
        param,
        f"{effort[:40]!r} has no place in the model's chat template, which does not use "
        "'reasoning_effort'; --ignore-reasoning-effort ignores it",
    )


def thinking_switch(
    state: ServerState, known: frozenset[str], *, on: bool, param: str
) -> dict[str, Any]:
    """Returns the template's variables that turn thinking on or off.

    A request for thinking is a hint: it is declined for a model that cannot think.

    Raises:
        ApiError: the template cannot turn the model's thinking off; or the model cannot think, and
            the server refuses hints.
    """
    thinks = state.chat_format.reasoning is not None
    for name in _SWITCHES:
        if name in known and thinks:
            return {name: on}
    if on and not thinks:
        if not refuses_hints():
            decline(param)
            return {}
        raise unsupported_error(param, "asks for thinking, but this model is not known to think")
    if not on and thinks:
        raise unsupported_error(
            param, "asks for no thinking, but the model's chat template has no switch for it"
        )
    return {}


def reasoning_tokens(usage: CompletionUsage) -> int:
    details = usage.completion_tokens_details
    return 0 if isinstance(details, UnsetType) else details.reasoning_tokens


class BudgetedChatGeneration:
    """A chat generation with one choice whose thinking ends after about `budget` tokens.

    If the model is still thinking then, its generation is aborted. A second generation continues
    from the same tokens with the thinking block closed; the prefix cache has their KV. Tokens
    arrive several at a time, so the thinking may exceed the budget by a few.

    Args:
        generation: the generation to bound; its dialogue has `with_tokens`.
        budget: most tokens of thinking.
    """

    def __init__(self, state: ServerState, generation: ChatGeneration, budget: int) -> None:
        self.request_id = generation.request_id
        self.start = generation.start
        self.ready = generation.ready
        self._state = state
        self._budget = budget
        self._thinking = generation
        self._answer: ChatGeneration | None = None
        self._closing: list[int] = []

    async def close(self) -> None:
        await self._thinking.close()
        if self._answer is not None:
            await self._answer.close()

    async def batches(self) -> AsyncIterator[list[ChatEvent]]:
        token_ids: list[int] = []
        batches = cast("AsyncGenerator[list[ChatEvent], None]", self._thinking.batches())
        async with contextlib.aclosing(batches):
            async for events in batches:
                yield events
                token_ids += [id for event in events for id in _token_ids(event)]
                if self._is_budget_spent(events, token_ids):
                    break
            else:
                return
        await self._thinking.close()
        self._answer = answer = self._continue_with_answer(token_ids)
        if answer is None:
            yield [Finished(0, "length")]
            return
        answer.start()
        async for events in answer.batches():
            yield events

    @property
    def usage(self) -> CompletionUsage:
        """Token counts. The tokens that close the thinking block count as thinking."""
        usage, extra = self._thinking.usage, len(self._closing)
        thought = usage.completion_tokens + extra
        if self._answer is not None:
            usage.completion_tokens = thought + self._answer.usage.completion_tokens
            usage.total_tokens = usage.prompt_tokens + usage.completion_tokens
            usage.completion_tokens_details = CompletionTokensDetails(thought)
        return usage

    def _is_budget_spent(self, events: list[ChatEvent], token_ids: list[int]) -> bool:
        if len(token_ids) < self._budget or not isinstance(events[-1], ReasoningDelta):
            return False
        format = self._state.chat_format.reasoning
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return format is not None and format.close not in text

    def _continue_with_answer(self, token_ids: list[int]) -> ChatGeneration | None:
        """Returns the generation of the answer after the thinking.

        Returns None if max_tokens or the context leaves no room for an answer.
        """
        format = self._state.chat_format.reasoning
        closing = format.closing if format is not None else ""
        self._closing = self._tokenizer.encode(closing, add_special_tokens=False).tolist()
        prompt = [*self._thinking.prompt_token_ids, *token_ids, *self._closing]
        dialogue = self._thinking.dialogue
        limit = dialogue.params.max_tokens
        left = None if limit is None else limit - len(token_ids) - len(self._closing)
        full = len(prompt) >= self._state.client.config.scheduler.max_model_len
        if full or (left is not None and left < 1):
            return None
        dialogue = replace(
            dialogue,
            params=replace_params(dialogue.params, max_tokens=left),
            request_id=f"{dialogue.request_id}-answer",
        )
        rendered = RenderedPrompt(closing, prompt, inputs=self._thinking.inputs)
        context = self._thinking.context
        context.is_continuation = True
        context.completion_tokens += len(self._closing)
        return ChatGeneration(self._state, self._tokenizer, dialogue, rendered, context)

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._state.tokenizer("thinking")


def _token_ids(event: ChatEvent) -> list[int]:
    return [] if isinstance(event, Finished) else event.token_ids
