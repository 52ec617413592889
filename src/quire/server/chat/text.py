"""Runs a request's prompts in the engine, and hands their output on in batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from quire.arrays import int32
from quire.errors import OverloadedError, RequestError
from quire.features.call import WEIGHTS, PromptInputs, RequestField
from quire.features.disaggregation.calls import PEER, PeerChoice
from quire.features.kv_events.prompt_report import encode_report
from quire.features.structured_output.calls import check_grammar
from quire.outputs import Logprob, VersionRun
from quire.sampling_params import SamplingParams
from quire.server.context.request_context import RequestContext, timeout_error
from quire.server.errors import ApiError
from quire.server.state import ServerState
from quire.server.telemetry.metrics import RequestTimer

if TYPE_CHECKING:
    from quire.engine.loop.output import CompletionUpdate


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class CompletionUsage(msgspec.Struct):
    """Token counts. `completion_tokens_details` is there where a reasoning parser runs."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


Prompt = str | list[int]
"""Text or token ids."""


@dataclass(slots=True)
class ChoiceText:
    """Stage 3 of a text: one choice's updates since the client's stream last took them.

    It merges several `CompletionUpdate` if the client is slow. In a chat, `ChatEvent` follow.

    Attributes:
        choice: index in the answer: the prompt's index times n plus the completion's index.
        texts: the updates' texts, in order.
        token_ids, logprobs: the updates' tokens.
        versions: the versions of the weights that gave the tokens.
        finish_reason, stop_reason: None until the completion ends.
        last: the completion's last update, once it has ended.
    """

    choice: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    versions: list[VersionRun] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last: CompletionUpdate | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, update: CompletionUpdate) -> None:
        self.texts.append(update.text)
        self.token_ids += update.token_ids
        self.versions += update.versions
        if update.logprobs is not None:
            self.logprobs += update.logprobs
        if update.finish_reason is not None:
            self.finish_reason = str(update.finish_reason)
            self.stop_reason = update.stop_reason
            self.last = update


@dataclass(slots=True)
class PromptInfo:
    """Data about a prompt from its first update.

    Attributes:
        token_ids: the prompt's token ids.
        logprobs: log-probabilities of the prompt's tokens, if the request asks for them.
        num_cached_tokens: prompt tokens from the prefix cache.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0


class TextGeneration:
    """The prompts of one HTTP request while the engine runs them.

    One task per prompt reads the engine's updates. `batches` yields all updates since the last
    batch, merged by choice. A slow client thus gets fewer and larger pieces, and the engine never
    waits for a client.

    Args:
        prompts: each is text or token ids.
        params: sampling parameters of all prompts.
        request_id: name of the request; prompts append their index.
        priority: priority in the engine's queue; lower runs first.
        cache_salt: prompts with different salts share no KV.
        inputs: the parts of the (only) prompt that are no text, or None.
        keep_special: ids of special tokens that stay in the text.
        grammar_field: the request's field that led to the grammar, for errors.
    """

    def __init__(
        self,
        state: ServerState,
        context: RequestContext,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        inputs: PromptInputs | None = None,
        keep_special: frozenset[int] = frozenset(),
        grammar_field: str = "structured_outputs",
    ) -> None:
        self.state = state
        self.context = context
        self.metrics = state.metrics
        self.params = params
        self.request_id = request_id
        self.priority = priority
        self.cache_salt = cache_salt
        self.keep_special = keep_special
        self.grammar_field = grammar_field
        self.prompts = [PromptInfo() for _ in prompts]
        self.completion_tokens = 0
        self.versions: dict[int, list[VersionRun]] = {}
        """The versions of the weights that gave a choice's tokens so far, by choice."""
        self.last: dict[int, CompletionUpdate] = {}
        """The last update of each choice that has ended."""
        self._prompts_given = prompts
        self._inputs = inputs
        self._tasks: list[asyncio.Task[None]] = []
        self._pieces: dict[int, ChoiceText] = {}
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._running = len(prompts)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self.context.hold()
        self.state.generations.add(self)
        self._tasks = [
            asyncio.create_task(self._run(i, prompt))
            for i, prompt in enumerate(self._prompts_given)
        ]
        if self.context.remaining is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.context.remaining, self._time_out)

    def _time_out(self) -> None:
        if self._running:
            self.context.end = "timeout"
            self.fail(timeout_error())

    def fail(self, error: ApiError) -> None:
        """Aborts the running prompts. `batches` raises `error` after the text so far."""
        if self._running:
            self._error = self._error or error
            for task in self._tasks:
                task.cancel()
            self._changed.set()

    def stop(self) -> None:
        """Aborts the running prompts. `batches` ends after the text so far."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Aborts the running prompts. Idempotent."""
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        self.state.generations.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._running and self._error is None:
            self.context.end = "abort"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.context.release()

    async def ready(self) -> None:
        """Waits for the first update, so that an invalid request still gets an error status.

        Raises:
            QuireError: the engine's error, or the one passed to `fail`.
        """
        await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def batches(self) -> AsyncIterator[list[ChoiceText]]:
        """Yields lists of new pieces, one piece per choice, until all prompts have ended.

        Raises:
            QuireError: as `ready`, after the pieces that came before the error.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            pieces, self._pieces = self._pieces, {}
            if pieces:
                yield list(pieces.values())
            if self._error is not None:
                raise self._error
            if not self._running and not self._pieces:
                return

    @property
    def usage(self) -> CompletionUsage:
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        cached = sum(prompt.num_cached_tokens for prompt in self.prompts)
        return CompletionUsage(
            prompt_tokens,
            self.completion_tokens,
            prompt_tokens + self.completion_tokens,
            PromptTokensDetails(cached),
        )

    async def _run(self, index: int, prompt: Prompt) -> None:
        clock, reason = RequestTimer(self.metrics, self.params.n), "abort"
        updates = self._updates(index, prompt)
        self.metrics.open.inc()
        try:
            async with contextlib.aclosing(updates):
                async for update in updates:
                    clock.observe(update)
                    self.context.observe(update)
                    self._add_update(index, update)
        except Exception as error:  # `batches` raises it.
            if isinstance(error, OverloadedError):
                self.state.note_full(self.context.tenant)
            self.context.end = reason = "error"
            self._error = self._error or self._named(error)
        except asyncio.CancelledError:
            if self.context.end == "timeout":
                reason = "timeout"
            raise
        finally:
            clock.end(reason)
            if self.context.trace is not None:
                self.context.trace.prompts.append(clock.phases())
            self.metrics.open.dec()
            self._running -= 1
            self._changed.set()

    def _named(self, error: Exception) -> Exception:
        """Returns an error, which names the request's field if its grammar was refused."""
        begun = self.completion_tokens or self.params.structured_outputs is None
        if begun or not isinstance(error, RequestError) or error.param != "structured_outputs":
            return error
        return _refused_grammar(error, self.grammar_field)

    async def check_grammar(self) -> None:
        """Waits until the grammar is compiled, for callers that answer before the request runs.

        Raises:
            ApiError: 400, the grammar cannot be enforced.
        """
        grammar = self.params.structured_outputs
        if grammar is None:
            return
        try:
            await check_grammar(self.state.client, grammar)
        except RequestError as error:
            raise _refused_grammar(error, self.grammar_field) from None

    def _updates(self, index: int, prompt: Prompt) -> AsyncGenerator[CompletionUpdate, None]:
        """Returns the updates of a prompt's completions."""
        return self._generate(prompt, self.params, f"{self.request_id}-{index}")

    def _generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str
    ) -> AsyncGenerator[CompletionUpdate, None]:
        return cast(
            "AsyncGenerator[CompletionUpdate, None]",
            self.state.client.generate(
                prompt,
                params,
                request_id=request_id,
                priority=self.priority,
                cache_salt=self.cache_salt,
                keep_special=self.keep_special,
                tenant=self.context.tenant,
                share=self.context.share,
                fields=self._fields(),
                inputs=self._inputs,
            ),
        )

    def _fields(self) -> dict[RequestField[Any], Any]:
        """Returns what the request carries for the engine's features."""
        context = self.context
        fields = dict(context.fields)
        if context.prefill is not None or context.traceparent:
            fields[PEER] = PeerChoice(context.prefill, context.traceparent)
        return fields

    def _add_update(self, index: int, update: CompletionUpdate) -> None:
        if update.prompt_token_ids is not None:
            info = self.prompts[index]
            info.token_ids = update.prompt_token_ids
            info.logprobs = update.prompt_logprobs
            info.num_cached_tokens = update.num_cached_tokens
            # Block hashes of a feature's model depend on what only the engine knows.
            if self.context.wants_report and index == 0 and not self.context.model:
                ids = int32(info.token_ids)
                known = ids if self._inputs is None else self._inputs.cache_ids(ids)
                client = self.state.client
                self.context.report = encode_report(
                    known,
                    self.cache_salt,
                    client.config.block_size,
                    client.first_alive.news(WEIGHTS),
                )
        self.completion_tokens += len(update.token_ids)
        choice = index * self.params.n + update.index
        piece = self._pieces.get(choice)
        if piece is None:
            piece = self._pieces[choice] = ChoiceText(choice)
        piece.add(update)
        if piece.last is not None:
            self.last[choice] = piece.last
        runs = self.versions.setdefault(choice, [])
        if len(runs) == 1 and len(update.versions) == 1 and runs[0][0] == update.versions[0][0]:
            runs[0] = runs[0][0], runs[0][1] + update.versions[0][1]
        else:
            runs += update.versions
        self._changed.set()


async def collect(generation: TextGeneration) -> list[ChoiceText]:
    """Runs a generation to the end, closes it, and returns one piece per choice, in order."""
    generation.start()
    merged: dict[int, ChoiceText] = {}
    try:
        async for pieces in generation.batches():
            for piece in pieces:
                first = merged.setdefault(piece.choice, piece)
                if first is not piece:
                    _extend(first, piece)
    finally:
        await generation.close()
    return [merged[choice] for choice in sorted(merged)]


def _extend(piece: ChoiceText, more: ChoiceText) -> None:
    piece.texts += more.texts
    piece.token_ids += more.token_ids
    piece.logprobs += more.logprobs
    piece.versions += more.versions
    piece.finish_reason, piece.stop_reason = more.finish_reason, more.stop_reason
    piece.last = more.last


def _refused_grammar(error: RequestError, field: str) -> ApiError:
    """Returns the error of a request whose grammar cannot be enforced."""
    return ApiError(400, f"Invalid value for '{field}': {error}", param=field, code=error.code)
