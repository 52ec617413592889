"""Generates the answer to a dialogue, as batches of chat events or as a whole."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from quire.outputs import Logprob, VersionRun
from quire.sampling_params import SamplingParams
from quire.server.chat.beams import BeamGeneration
from quire.server.chat.choice_parser import ChoiceParser, plain_events
from quire.server.chat.dialogue import ChatAnswer, ChatEvent, Dialogue
from quire.server.chat.prompt import RenderedPrompt, render_prompt
from quire.server.chat.prompt_parts import load_parts, place_parts
from quire.server.chat.text import (
    ChoiceText,
    CompletionTokensDetails,
    CompletionUsage,
    TextGeneration,
    collect,
)
from quire.server.chat.tools import callable_tools, check_tools, constrain_params, one_call
from quire.server.context.request_context import RequestContext
from quire.server.errors import ApiError
from quire.server.parsers.think import ThinkParser
from quire.server.state import ServerState

if TYPE_CHECKING:
    from quire.engine.loop.output import CompletionUpdate
    from quire.text.tokenizer import Tokenizer

_LONG_TEXT = 20_000
"""Characters above which an answer is parsed in a thread, so that the event loop goes on."""


async def prepare(
    state: ServerState,
    dialogue: Dialogue,
    context: RequestContext,
    before: Sequence[int] = (),
) -> ChatGeneration:
    """Returns a generation that is ready to start, and charges its tokens to the key's limit.

    Args:
        before: token ids to put before the prompt.

    Raises:
        ApiError, RequestError: a field is invalid; the error names it.
    """
    state.check_generates()
    tokenizer = state.tokenizer("messages")
    check_tools(dialogue, state.chat_format)
    parts = await load_parts(state, dialogue.parts, context)

    def build() -> ChatGeneration:
        most = state.client.config.scheduler.max_model_len
        prompt = render_prompt(tokenizer, dialogue, most)
        prompt.token_ids, prompt.inputs = place_parts(state, prompt.token_ids, parts)
        if prompt.inputs is not None and before:
            prompt.inputs = prompt.inputs.shifted(len(before))
        prompt.token_ids = [*before, *prompt.token_ids]
        if state.args.log_prompts:
            context.prompts.append(prompt.text)
        return ChatGeneration(state, tokenizer, dialogue, prompt, context)

    generation = await asyncio.to_thread(build)
    params = generation.params
    # Beam search computes one token per beam in each step, so every beam counts as a completion.
    completions = params.n if dialogue.beams is None else dialogue.beams.beam_width
    context.take_tokens(len(generation.prompt_token_ids), dialogue.params.max_tokens, completions)
    return generation


async def count(state: ServerState, dialogue: Dialogue, context: RequestContext) -> list[int]:
    """Returns the prompt's token ids without running it.

    Raises:
        ApiError, RequestError: as `prepare`.
    """
    tokenizer = state.tokenizer("messages")
    check_tools(dialogue, state.chat_format)
    parts = await load_parts(state, dialogue.parts, context)

    def build() -> list[int]:
        return place_parts(state, render_prompt(tokenizer, dialogue).token_ids, parts)[0]

    return await state.count(build)


class ChatGeneration:
    """The generation of the answer to one dialogue.

    `start`, `ready`, `stop`, `close` and `check_grammar` are the methods of its `TextGeneration`.

    Attributes:
        params: the dialogue's sampling parameters, with a grammar if tool calls need one.
        prompt_token_ids: the prompt's token ids.
        inputs: the prompt's parts that are no text, or None.
    """

    def __init__(
        self,
        state: ServerState,
        tokenizer: Tokenizer,
        dialogue: Dialogue,
        prompt: RenderedPrompt,
        context: RequestContext,
    ) -> None:
        self.dialogue = dialogue
        self.context = context
        self.request_id = dialogue.request_id
        self.prompt_token_ids = prompt.token_ids
        self.inputs = prompt.inputs
        self._tokenizer = tokenizer
        self._format = format = state.chat_format
        self._tools = callable_tools(dialogue)
        self._parsers: dict[int, ChoiceParser] = {}
        self._begins_open: bool | None = None
        if format.reasoning is not None:
            self._begins_open = format.reasoning.begins_open(prompt.text, prompt.continued)
        self._tool_parser = format.tool_parser
        if self._tool_parser is not None and not (self._tools or self._tool_parser.marks_text):
            self._tool_parser = None
        needs_parsing = self._tool_parser is not None or format.reasoning is not None
        self.params = self._params()
        beams = dialogue.beams
        if beams is not None and self.params.structured_outputs is not None:
            raise ApiError(
                400,
                "'use_beam_search' is not available where calls must be made or checked.",
                param="use_beam_search",
                code="invalid_value",
            )
        kind = TextGeneration if beams is None else functools.partial(BeamGeneration, beams)
        self._generation = kind(
            state,
            context,
            [prompt.token_ids],
            self.params,
            request_id=dialogue.request_id,
            priority=dialogue.priority,
            cache_salt=dialogue.cache_salt,
            inputs=prompt.inputs,
            keep_special=format.keep_special if needs_parsing else frozenset(),
            grammar_field="structured_outputs" if self._asked_for_grammar else "tools",
        )
        self._read = self._read_format if needs_parsing else self._read_plain
        self.start = self._generation.start
        self.ready = self._generation.ready
        self.stop = self._generation.stop
        self.close = self._generation.close
        self.check_grammar = self._generation.check_grammar

    async def batches(self) -> AsyncIterator[list[ChatEvent]]:
        """Yields the events since the last batch. No batch is empty."""
        async for pieces in self._generation.batches():
            events: list[ChatEvent] = []
            for piece in pieces:
                events += self._read(piece)
            if events:
                yield events

    async def whole(self) -> list[ChatAnswer]:
        """Runs to the end, closes the generation, and returns one answer per choice, in order."""
        answers = []
        for piece in await collect(self._generation):
            if sum(map(len, piece.texts)) > _LONG_TEXT:
                events = await asyncio.to_thread(self._read, piece)
            else:
                events = self._read(piece)
            answer = ChatAnswer(piece.choice)
            for event in events:
                answer.add(event)
            answers.append(answer)
        return answers

    @property
    def usage(self) -> CompletionUsage:
        usage = self._generation.usage
        if self._format.reasoning is not None:
            count = sum(parser.reasoning_tokens for parser in self._parsers.values())
            usage.completion_tokens_details = CompletionTokensDetails(count)
        return usage

    def versions(self, choice: int) -> list[VersionRun]:
        """Returns the versions of the weights that gave a choice's tokens so far."""
        return self._generation.versions.get(choice, [])

    def last_update(self, choice: int) -> CompletionUpdate | None:
        """Returns a choice's last update; None: it has not ended."""
        return self._generation.last.get(choice)

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        return self._generation.prompts[0].logprobs

    def _params(self) -> SamplingParams:
        added = self._tokenizer.added_tokens if self._needs_grammar() else {}
        params = constrain_params(self.dialogue, self._format, added, self._begins_open)
        self._enforced = params is not self.dialogue.params
        usual = self.dialogue.default_max_tokens
        return params if usual is None else replace(params, max_tokens=usual)

    def _needs_grammar(self) -> bool:
        return bool(self._tools) or self._asked_for_grammar

    @property
    def _asked_for_grammar(self) -> bool:
        return self.dialogue.params.structured_outputs is not None

    def _read_plain(self, piece: ChoiceText) -> list[ChatEvent]:
        return plain_events(piece, self.dialogue.with_tokens)

    def _read_format(self, piece: ChoiceText) -> list[ChatEvent]:
        parser = self._parsers.get(piece.choice)
        if parser is None:
            parser = self._parsers[piece.choice] = self._new_parser()
        return parser.read(piece)

    def _new_parser(self) -> ChoiceParser:
        format, dialogue = self._format, self.dialogue
        tools = (
            None if self._tool_parser is None else self._tool_parser(self._tools, self._enforced)
        )
        calls = () if tools is None or tools.marks_text else tools.starts
        think = None
        if format.reasoning is not None:
            think = ThinkParser(format.reasoning, self._begins_open, calls)
        return ChoiceParser(
            self._tokenizer,
            think,
            tools,
            custom_tools=dialogue.custom_tools,
            one_call=one_call(dialogue),
            show_reasoning=dialogue.include_reasoning,
            with_tokens=dialogue.with_tokens,
        )
