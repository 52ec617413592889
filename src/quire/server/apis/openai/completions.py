"""`/v1/completions` and `/generate`."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.sampling_params import SamplingParams
from quire.server.apis.openai.beams import beams_of
from quire.server.apis.openai.chunks import ChunkWriter
from quire.server.apis.openai.convert import (
    check_fan_out,
    check_logprobs,
    check_prompt_logprobs,
    check_routed_experts,
    check_streaming,
    estimate_tokens,
    prompt_text,
    prompts_of,
    sampling_params,
    tokenized,
)
from quire.server.apis.openai.fim import infill
from quire.server.apis.openai.logprobs import (
    CompletionLogprobWriter,
    are_many,
    array_entries,
    entries_in,
    formatted,
    joined,
    prompt_logprobs,
)
from quire.server.apis.openai.objects import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionObject,
    GenerateAnswer,
    PromptLogprobs,
    routed_experts_of,
    sampling_info_of,
    versions_of,
)
from quire.server.apis.openai.protocol import CompletionRequest, GenerateRequest
from quire.server.apis.openai.structured import structured_field
from quire.server.apis.openai.vocabulary import prompt_room, prompt_tokens
from quire.server.chat.beams import BeamGeneration
from quire.server.chat.text import ChoiceText, Prompt, TextGeneration, collect
from quire.server.context.request_context import RequestContext, context_of
from quire.server.errors import ApiError
from quire.server.http.bodies import read_body
from quire.server.http.sse import EventStream, json_response, start_stream, unless_disconnected
from quire.server.state import ServerState, new_id, state_of

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

_NOT_BESIDE = (
    ("suffix", "echo"),
    ("suffix", "truncate_prompt_tokens"),
    ("suffix", "add_special_tokens"),
    ("echo", "truncate_prompt_tokens"),
)
"""Fields that make prompts in ways that do not go together."""


async def completions(request: Request) -> Response:
    state = state_of(request)
    body = await read_body(request, CompletionRequest, state.args.max_body_bytes)
    state.check_alive()
    state.check_model(body.model, context_of(request))
    prompts = prompts_of(body.prompt)
    check_fan_out(len(prompts), max(body.n or 1, body.best_of or 1, body.beam_width or 1))
    _check(state, body, prompts)
    params = _params(state, body)
    most = state.client.config.scheduler.max_model_len
    if body.logprobs is not None:
        check_logprobs(params, len(prompts), most, "logprobs")
    counted = params.prompt_logprobs is not None or params.return_routed_experts
    inputs = await _inputs(state, body, prompts, always=counted)
    check_routed_experts(state.client.config, params, [*map(len, inputs)])
    echoed = body.echo and body.logprobs is not None
    check_prompt_logprobs(
        sum(map(len, inputs)), params, body.n or 1, "logprobs" if echoed else "prompt_logprobs"
    )
    context = context_of(request)
    beams = beams_of(body, params, body.n or 1, body.best_of)
    charge(state, context, inputs, params, params.n if beams is None else beams.beam_width)
    kind = TextGeneration if beams is None else functools.partial(BeamGeneration, beams)
    generation = kind(
        state,
        context,
        inputs,
        params,
        request_id=new_id("cmpl"),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        grammar_field=structured_field(body),
    )
    writer = CompletionWriter(state, body, prompts, generation)
    if not body.stream:
        pieces = await unless_disconnected(request.receive, collect(generation))
        if _ranks(body):
            pieces = best_completions(pieces, body.best_of or 1, body.n or 1)
        return json_response(await formatted(writer.size(pieces), lambda: writer.answer(pieces)))
    await start_stream(request, generation)
    return EventStream(
        generation,
        writer.write,
        writer.chunks.finish,
        is_long=lambda pieces: are_many(writer.size(pieces)),
        metrics=state.metrics,
    )


def charge(
    state: ServerState,
    context: RequestContext,
    prompts: list[Prompt],
    params: SamplingParams,
    completions: int,
) -> None:
    """Takes the tokens that the prompts may use from the key's limit. Raises ApiError, 429.

    Args:
        completions: that run for each prompt, beams among them.
    """
    if state.args.log_prompts:
        context.prompts += [prompt_text(state.client.tokenizer, prompt) for prompt in prompts]
    most = None if params.max_tokens is None else params.max_tokens * len(prompts)
    context.take_tokens(sum(map(estimate_tokens, prompts)), most, completions)


async def _inputs(
    state: ServerState,
    body: CompletionRequest | GenerateRequest,
    prompts: list[Prompt],
    *,
    always: bool = False,
) -> list[Prompt]:
    """Returns the prompts, or with a suffix those that fill in the middle. always: texts are
    tokenized here in any case."""
    most = state.client.config.scheduler.max_model_len
    suffix = body.suffix if isinstance(body, CompletionRequest) else None
    if body.truncate_prompt_tokens is not None or body.add_special_tokens is False:
        return await prompt_tokens(
            state.client.tokenizer,
            prompts,
            special=body.add_special_tokens is not False,
            most=prompt_room(body.truncate_prompt_tokens, most, _max_tokens(body)),
            side=body.truncation_side,
            longest=most,
        )
    if not suffix:
        return await tokenized(state.client.tokenizer, prompts, most, always=always)
    tokenizer = state.tokenizer("suffix")
    return await asyncio.to_thread(lambda: [infill(tokenizer, p, suffix) for p in prompts])


def _max_tokens(body: CompletionRequest | GenerateRequest) -> int | None:
    if body.max_tokens is None and isinstance(body, CompletionRequest):
        return 16
    return body.max_tokens


def best_completions(pieces: list[ChoiceText], best_of: int, n: int) -> list[ChoiceText]:
    """Returns the best `n` of each prompt's `best_of` completions, renumbered.

    Completions are ranked by their mean log-probability per token.
    """
    best = []
    for start in range(0, len(pieces), best_of):
        ranked = sorted(pieces[start : start + best_of], key=_mean_logprob, reverse=True)
        best += ranked[:n]
    for choice, piece in enumerate(best):
        piece.choice = choice
    return best


def _mean_logprob(piece: ChoiceText) -> float:
    values = [
        entry[token].logprob for token, entry in zip(piece.token_ids, piece.logprobs, strict=True)
    ]
    return sum(values) / max(1, len(values))


def _ranks(body: CompletionRequest) -> bool:
    """Tells whether more completions are sampled than returned. A beam search ranks by itself."""
    return not body.use_beam_search and (body.best_of or 1) > (body.n or 1)


def _check(state: ServerState, body: CompletionRequest, prompts: list[Prompt]) -> None:
    if any(isinstance(prompt, str) for prompt in prompts):
        state.tokenizer("prompt")
    if body.logprobs is not None:
        state.tokenizer("logprobs")
    if body.best_of is not None:
        if body.best_of < (body.n or 1):
            raise ApiError(400, "'best_of' must not be less than 'n'.", param="best_of")
        if body.stream and body.best_of > (body.n or 1):
            raise ApiError(
                400,
                "'best_of' is not available with stream=true: what is best shows at the end.",
                param="best_of",
            )
    for name, other in _NOT_BESIDE:
        unused = (None, False) if other == "echo" else (None,)
        if getattr(body, name) and getattr(body, other) not in unused:
            raise ApiError(400, f"'{name}' and '{other}' exclude each other.", param=name)
    if body.return_tokens_as_token_ids and body.logprobs is None:
        raise ApiError(
            400,
            "'return_tokens_as_token_ids' needs 'logprobs'.",
            param="return_tokens_as_token_ids",
        )
    mode = body.logprobs_mode or "auto"
    if _ranks(body) and (state.client.config.args.logprobs_mode if mode == "auto" else mode) in (
        "raw_logits",
        "processed_logits",
    ):
        raise ApiError(
            400,
            "'best_of' ranks completions by log-probabilities, but 'logprobs_mode' gives logits.",
            param="best_of",
        )
    check_streaming(body)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(
            400, "'max_tokens' must be at least 1, unless echo is true.", param="max_tokens"
        )


def _params(state: ServerState, body: CompletionRequest) -> SamplingParams:
    """Returns the sampling parameters.

    With `echo` and `max_tokens` 0, a way to score a prompt, the engine makes one token, which is
    then left out. Echoed log-probabilities are the engine's prompt log-probabilities. `best_of`
    ranks by log-probabilities.
    """
    if body.echo and body.logprobs is not None:
        both = body.logprobs, body.prompt_logprobs or 0
        body.prompt_logprobs = -1 if -1 in both else max(both)
    ranked = _ranks(body)
    return sampling_params(
        body,
        state,
        max_tokens=_max_tokens(body) or 1,
        n=(body.best_of if ranked else body.n) or 1,
        logprobs=0 if ranked and body.logprobs is None else body.logprobs,
        detokenize=state.client.tokenizer is not None,
    )


class CompletionWriter:
    """Writes pieces as choices, for whole answers and for chunks."""

    def __init__(
        self,
        state: ServerState,
        body: CompletionRequest,
        prompts: list[Prompt],
        generation: TextGeneration,
    ) -> None:
        self.body = body
        self.prompts = prompts
        self.generation = generation
        self.n = body.n or 1
        self.tokenizer = state.client.tokenizer
        self.model = generation.context.model or state.model_name
        self.fingerprint = state.fingerprint
        self.created = int(time.time())
        self.with_prompt_logprobs = body.prompt_logprobs is not None and not body.stream
        self.chunks = ChunkWriter(body.stream_options, self.envelope, lambda: self.usage)
        own = body.request_id
        self.id = generation.request_id if own is None else f"cmpl-{own}"
        self.begun: set[int] = set()
        self.logprobs: dict[int, CompletionLogprobWriter] = {}
        # What all completions of a prompt repeat, by the prompt's index.
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.echoed: dict[int, tuple[CompletionLogprobs, CompletionLogprobWriter]] = {}

    @property
    def usage(self) -> Any:
        if self.body.max_tokens == 0:
            self.generation.completion_tokens = 0
        return self.generation.usage

    def envelope(
        self, choices: list[CompletionChoice], usage: Any = UNSET
    ) -> CompletionObject[CompletionChoice]:
        return CompletionObject(
            self.id,
            "text_completion",
            self.created,
            self.model,
            choices,
            usage,
            system_fingerprint=self.fingerprint,
        )

    def size(self, pieces: list[ChoiceText]) -> int:
        """Returns the number of values that the pieces are written with, besides text."""
        indices = {p.choice // self.n for p in pieces if p.choice not in self.begun}
        prompts = [self.generation.prompts[index].logprobs or () for index in indices]
        logprobs = sum(map(entries_in, [*prompts, *(piece.logprobs for piece in pieces)]))
        return logprobs + sum(array_entries(piece.last) for piece in pieces)

    def answer(self, pieces: list[ChoiceText]) -> CompletionObject[CompletionChoice]:
        return self.envelope([self.choice(piece) for piece in pieces], usage=self.usage)

    def write(self, buffer: bytearray, pieces: list[ChoiceText]) -> None:
        for piece in pieces:
            self.chunks.write(buffer, self.choice(piece))

    def choice(self, piece: ChoiceText) -> CompletionChoice:
        info = self.generation.prompts[piece.choice // self.n]
        first = piece.choice not in self.begun
        self.begun.add(piece.choice)
        text, token_ids, entries = piece.text, piece.token_ids, piece.logprobs
        if self.body.max_tokens == 0:
            text, token_ids, entries = "", [], []
        if self.body.echo and first:
            text = self._prompt_text(piece.choice) + text
        choice = CompletionChoice(piece.choice, text, None, piece.finish_reason)
        if piece.stop_reason is not None:
            choice.stop_reason = piece.stop_reason
        if self.body.logprobs is not None:
            choice.logprobs = self._logprobs(piece.choice, token_ids, entries)
        if self.body.return_token_ids:
            choice.token_ids = [] if self.body.max_tokens == 0 else piece.token_ids
            if first:
                choice.prompt_token_ids = info.token_ids
        always = bool(self.body.return_token_ids)
        runs = [] if self.body.max_tokens == 0 else piece.versions
        choice.weight_versions = versions_of(runs, always=always)
        shown = 0 if self.body.max_tokens == 0 else None
        choice.sampling_info = sampling_info_of(piece.last, shown)
        choice.routed_experts = routed_experts_of(piece.last)
        if self.with_prompt_logprobs and info.logprobs is not None:
            index = piece.choice // self.n
            if index not in self.prompt_logprobs:
                self.prompt_logprobs[index] = prompt_logprobs(info.logprobs)
            choice.prompt_logprobs = self.prompt_logprobs[index]
        return choice

    def _prompt_text(self, choice: int) -> str:
        prompt = self.prompts[choice // self.n]
        if isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(
            prompt, skip_special_tokens=self.generation.params.skip_special_tokens
        )

    def _logprobs(self, choice: int, token_ids: Any, entries: Any) -> CompletionLogprobs | None:
        if self.tokenizer is None or self.body.logprobs is None:
            return None
        writer = self.logprobs.get(choice)
        if writer is not None:
            return writer.write(token_ids, entries)
        prompt, before = self._echoed(self.tokenizer, choice // self.n)
        writer = self.logprobs[choice] = before.fork()
        return joined(prompt, writer.write(token_ids, entries))

    def _echoed(
        self, tokenizer: Tokenizer, index: int
    ) -> tuple[CompletionLogprobs, CompletionLogprobWriter]:
        """Returns the log-probabilities of the echoed prompt, and the writer that goes on behind
        it."""
        if index not in self.echoed:
            count = self.generation.params.logprobs or 0
            as_ids = bool(self.body.return_tokens_as_token_ids)
            writer = CompletionLogprobWriter(tokenizer, count, as_ids=as_ids)
            info = self.generation.prompts[index]
            scored = info.logprobs or [] if self.body.echo else []
            ids = info.token_ids if self.body.echo else []
            self.echoed[index] = writer.write(ids, scored), writer
        return self.echoed[index]


async def generate(request: Request) -> Response:
    """Answers `/generate`: one prompt in, one JSON object out, or with `stream` the bare text."""
    state = state_of(request)
    body = await read_body(request, GenerateRequest, state.args.max_body_bytes)
    state.check_alive()
    state.check_model(body.model, context_of(request))
    prompts = prompts_of(body.prompt)
    if len(prompts) != 1:
        raise ApiError(400, "/generate takes one prompt.", param="prompt", code="invalid_value")
    if isinstance(prompts[0], str) or body.stream:
        state.tokenizer("prompt")
    if body.prompt_logprobs is not None:
        raise ApiError(
            400, "'prompt_logprobs' is not available in /generate.", param="prompt_logprobs"
        )
    for name in ("return_sampling_info", "return_routed_experts"):
        if body.stream and getattr(body, name):
            raise ApiError(
                400,
                f"'{name}' is not available in /generate with stream=true, which sends bare text.",
                param=name,
            )
    params = sampling_params(
        body,
        state,
        max_tokens=body.max_tokens,
        detokenize=state.client.tokenizer is not None,
    )
    context = context_of(request)
    inputs = await _inputs(state, body, prompts, always=params.return_routed_experts)
    check_routed_experts(state.client.config, params, [*map(len, inputs)])
    charge(state, context, inputs, params, params.n)
    generation = TextGeneration(
        state,
        context,
        inputs,
        params,
        request_id=new_id("gen"),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        grammar_field=structured_field(body),
    )
    if not body.stream:
        (piece,) = await unless_disconnected(request.receive, collect(generation))
        ids = piece.token_ids if body.return_token_ids else UNSET
        versions = versions_of(piece.versions, always=bool(body.return_token_ids))

        def answer() -> GenerateAnswer:
            return GenerateAnswer(
                piece.text,
                piece.finish_reason,
                generation.usage,
                ids,
                versions,
                sampling_info_of(piece.last),
                routed_experts_of(piece.last),
            )

        return json_response(await formatted(array_entries(piece.last), answer))
    await start_stream(request, generation)
    return EventStream(
        generation,
        lambda buffer, pieces: buffer.extend("".join(p.text for p in pieces).encode()),
        lambda buffer: None,
        metrics=state.metrics,
        media_type="text/plain",
    )
