"""Beam search for HTTP requests: the completions are the likeliest sequences."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from quire.engine.loop.beam_search import BeamSearch, BeamSearchParams
from quire.engine.loop.output import CompletionUpdate
from quire.outputs import Logprob
from quire.sampling_params import SamplingParams
from quire.server.chat.text import Prompt, TextGeneration


class BeamGeneration(TextGeneration):
    """The `n` best sequences of each prompt. They all come at the end of the search.

    Args:
        beams: parameters of the search. `params` gives the number of sequences to return, and
            whether they have log-probabilities.
    """

    def __init__(self, beams: BeamSearchParams, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._beams = beams

    async def _updates(self, index: int, prompt: Prompt) -> AsyncGenerator[CompletionUpdate, None]:
        name, client = f"{self.request_id}-{index}", self.state.client
        # The first beam is the prompt itself. Its update has the prompt's token ids.
        search = BeamSearch(self._beams, client.config, 0)
        self.context.searched_tokens += 1
        first = await self._next_token(prompt, search.step_params, f"{name}-0-0")
        ids = first.prompt_token_ids or []
        search = BeamSearch(self._beams, client.config, len(ids))
        search.advance([_alternatives(first)])
        steps = 1
        while not search.over:
            prompts = [[*ids, *tokens] for tokens in search.beams]
            self.context.searched_tokens += len(prompts)
            search.advance(await self._next_tokens(prompts, search.step_params, f"{name}-{steps}"))
            steps += 1
        best = await client.sequences(search, self.params.n, ids, self.params, self.keep_special)
        for place, sequence in enumerate(best):
            update = CompletionUpdate(
                place,
                sequence.text,
                sequence.token_ids,
                None if self.params.logprobs is None else sequence.logprobs,
                sequence.finish_reason,
                sequence.stop_reason,
            )
            if place == 0:
                update.prompt_token_ids = ids
                update.num_cached_tokens, update.queued = first.num_cached_tokens, first.queued
            yield update

    async def _next_tokens(
        self, prompts: list[list[int]], params: SamplingParams, name: str
    ) -> list[dict[int, Logprob]]:
        """Returns the candidates for the next token of each prompt.

        If one prompt fails, the others are cancelled.
        """
        tasks = [
            asyncio.create_task(self._next_token(prompt, params, f"{name}-{place}"))
            for place, prompt in enumerate(prompts)
        ]
        try:
            return [_alternatives(update) for update in await asyncio.gather(*tasks)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _next_token(
        self, prompt: Prompt, params: SamplingParams, name: str
    ) -> CompletionUpdate:
        """Returns one update with the next token and its alternatives."""
        merged = CompletionUpdate(0, logprobs=[])
        async with contextlib.aclosing(self._generate(prompt, params, name)) as updates:
            async for update in updates:
                if update.prompt_token_ids is not None:
                    merged.prompt_token_ids = update.prompt_token_ids
                    merged.num_cached_tokens = update.num_cached_tokens
                    merged.queued = update.queued
                merged.logprobs = [*(merged.logprobs or ()), *(update.logprobs or ())]
        return merged


def _alternatives(update: CompletionUpdate) -> dict[int, Logprob]:
    return (update.logprobs or [{}])[0]
