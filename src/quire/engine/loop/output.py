"""Converts the engine's tokens to users' output, for the async client and `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.arrays import Int16
from quire.outputs import Logprob, SamplingInfo, VersionRun
from quire.plan import ChosenExperts, DrawnTokens, Logprobs
from quire.sampling_params import SamplingParams
from quire.text.detokenizer import Detokenizer, StopMatcher
from quire.text.tokenizer import Tokenizer


@dataclass(slots=True)
class CompletionUpdate:
    """One completion's new tokens with their text.

    It is made from a `TokenDelta`. The server makes a `ChoiceText` from it.

    Attributes:
        index: number of the completion among the request's `n`.
        text, token_ids, logprobs: the new output.
        finish_reason, stop_reason: None until the completion ends.
        prompt_token_ids, prompt_logprobs, num_cached_tokens: set in the request's first update.
        queued: seconds until the request's first step; set in the first update.
        versions: the versions of the weights that gave the tokens.
        sampling_info, routed_experts: of all of its tokens; set in its last update.
        delays: the completion's `RequestTimes.delays` so far; set in its first and last update, but
            empty in the last one if a stop string ends it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    queued: float = 0.0
    versions: list[VersionRun] = field(default_factory=list)
    sampling_info: SamplingInfo | None = None
    routed_experts: Int16 | None = None
    delays: dict[str, float] = field(default_factory=dict)


def cut_runs(runs: Sequence[VersionRun], tokens: int) -> list[VersionRun]:
    """Returns the runs of the first `tokens` tokens. Neighbours of one version are joined."""
    found: list[VersionRun] = []
    for version, count in runs:
        taken = min(count, tokens)
        tokens -= taken
        if taken and found and found[-1][0] == version:
            found[-1] = version, found[-1][1] + taken
        elif taken:
            found.append((version, taken))
    return found


class CompletionReader:
    """Turns one completion's tokens into updates.

    A completion may end earlier here than in the engine, at a stop string; the caller must then
    abort the request.
    """

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        keep_special: frozenset[int] = frozenset(),
        leader: CompletionReader | None = None,
    ) -> None:
        """Sets up the detokenizer and stop strings that `params` ask for.

        Args:
            keep_special: special tokens that are in the text despite `skip_special_tokens`.
            leader: reader of the first completion of the same prompt, if this is another one.
        """
        self._drawn: list[DrawnTokens] = []
        before: ExpertsByPosition | None = None if leader is None else leader._experts
        self._experts: ExpertsByPosition = ExpertsByPosition(len(prompt), before)
        self.index = index
        self.finished = False
        self.ended_by_text = False
        self._params = params
        self._tokenizer = tokenizer
        self._count = 0
        self._detokenizer: Detokenizer | None = None
        self._stops: StopMatcher | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer,
                prompt,
                skip_special_tokens=params.skip_special_tokens,
                keep=keep_special,
            )
            if params.stop:
                self._stops = StopMatcher(params.stop, include=params.include_stop_str_in_output)

    def feed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[Logprobs] = (),
        finish_reason: str | None = None,
        stop_token: int | None = None,
        versions: Sequence[VersionRun] = (),
        drawn: Sequence[DrawnTokens] = (),
    ) -> CompletionUpdate:
        """Returns the update for `tokens`. A stop token is in its token ids, but not in its text.

        Args:
            finish_reason: why the engine ended the completion; None: it has not ended.
            stop_token: the stop token that ended it.
            versions: versions of the weights that gave the tokens; () for version 0.
            drawn: how the tokens were drawn, if the request asks for it.
        """
        self._drawn += drawn
        update = CompletionUpdate(self.index)
        if self._params.logprobs is not None:
            update.logprobs = [
                entry for part in logprobs for entry in logprob_dicts(part, self._tokenizer)
            ]
        shown = len(tokens)
        if stop_token is not None and not self._params.include_stop_str_in_output:
            shown -= 1
        texts = []
        if self._stops is not None:
            texts.append(self._until_stop(tokens, shown, update))
        else:
            update.token_ids = list(tokens)
            texts.append(self._text(tokens[:shown], whole=finish_reason is not None))
        self._count += len(update.token_ids)
        if update.finish_reason is None and finish_reason is not None:
            texts.append(self._rest(update))
        if update.finish_reason is None and finish_reason is not None:
            update.finish_reason = finish_reason
            if stop_token is not None and stop_token in self._params.stop_token_ids:
                update.stop_reason = stop_token
        if update.logprobs is not None:
            update.logprobs = update.logprobs[: len(update.token_ids)]
        update.versions = cut_runs(versions or [(0, len(tokens))], len(update.token_ids))
        update.text = "".join(texts)
        self.finished = update.finish_reason is not None
        if self.finished:
            self._add_rollout(update)
        return update

    def feed_experts(self, experts: ChosenExperts) -> None:
        """Takes experts of some positions. Those of a step come before its tokens."""
        self._experts.feed(experts)

    def _add_rollout(self, update: CompletionUpdate) -> None:
        """Adds the arrays about all tokens to the last update."""
        if self._params.return_sampling_info:
            update.sampling_info = _sampling_info(self._drawn, self._count)
        if self._params.return_routed_experts:
            update.routed_experts = self._experts.first(self._experts.prompt_len + self._count - 1)

    def _text(self, tokens: Sequence[int], *, whole: bool) -> str:
        """Returns the tokens' text. `whole`: no more tokens will follow."""
        if self._detokenizer is None:
            return ""
        if whole and self._count == 0:
            return self._detokenizer.whole(tokens)
        return "".join(map(self._detokenizer.step, tokens))

    def _until_stop(self, tokens: Sequence[int], shown: int, update: CompletionUpdate) -> str:
        """Returns the text of the first `shown` tokens, up to the stop string that ends it."""
        texts = []
        for place, token in enumerate(tokens):
            update.token_ids.append(token)
            if place < shown:
                texts.append(self._searched(token, self._count + place + 1, update))
            if update.finish_reason is not None:
                break
        return "".join(texts)

    def _searched(self, token: int, count: int, update: CompletionUpdate) -> str:
        text = self._detokenizer.step(token) if self._detokenizer is not None else ""
        return self._shown(text, count, update)

    def _shown(self, text: str, count: int, update: CompletionUpdate) -> str:
        """Returns the text to emit now. Text that may begin a stop string is held back.

        Args:
            text: text of the latest token.
            count: number of the completion's tokens, that one included.
        """
        if self._stops is None or not text:
            return text
        text, stop = self._stops.feed(text, early=count <= self._params.min_tokens)
        if stop is not None:
            update.finish_reason, update.stop_reason = "stop", stop
            self.ended_by_text = True
        return text

    def _rest(self, update: CompletionUpdate) -> str:
        """Returns the text that was held back, up to a stop string in it."""
        if self._detokenizer is None:
            return ""
        rest = self._shown(self._detokenizer.finish(), self._count, update)
        return rest + (self._stops.finish() if self._stops else "")


def completion_readers(
    prompt: Sequence[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    keep_special: frozenset[int] = frozenset(),
) -> list[CompletionReader]:
    """Returns a reader for each completion of a prompt."""
    readers: list[CompletionReader] = []
    for index in range(params.n):
        leader = readers[0] if readers else None
        readers.append(CompletionReader(index, prompt, params, tokenizer, keep_special, leader))
    return readers


def _sampling_info(parts: Sequence[DrawnTokens], count: int) -> SamplingInfo:
    """Returns the entries of the first `count` tokens."""
    empty = np.empty(0, dtype=np.float32)
    columns = [
        np.concatenate([empty, *(getattr(part, name) for part in parts)])[:count]
        for name in ("raw", "processed", "sizes")
    ]
    return SamplingInfo(columns[0], columns[1], columns[2].astype(np.int32))


class ExpertsByPosition:
    """The experts of a completion's tokens.

    Args:
        leader: experts of the first completion of the same prompt, which computes the prompt.
    """

    def __init__(self, prompt_len: int, leader: ExpertsByPosition | None) -> None:
        self.prompt_len = prompt_len
        self._leader = leader
        self._ids: Int16 = np.empty((0, 0, 0), dtype=np.int16)

    def feed(self, experts: ChosenExperts) -> None:
        """Writes the experts of some positions over those that came before."""
        if not len(experts.positions):
            return
        end = 1 + int(experts.positions.max())
        if end > len(self._ids):
            self._grow(max(end, 2 * len(self._ids)), experts.ids.shape[1:])
        self._ids[experts.positions] = experts.ids

    def _grow(self, size: int, shape: tuple[int, ...]) -> None:
        grown = np.full((size, *shape), -1, dtype=np.int16)
        if self._leader is not None:
            prompt = self._leader.first(self.prompt_len)
            grown[: len(prompt)] = prompt
        if len(self._ids):
            grown[: len(self._ids)] = self._ids
        self._ids = grown

    def first(self, count: int) -> Int16:
        """Returns the experts of the first tokens; -1 for a token that has none."""
        if self._leader is not None and not len(self._ids):
            return self._leader.first(count)
        found = np.full((count, *self._ids.shape[1:]), -1, dtype=np.int16)
        known = self._ids[:count]
        found[: len(known)] = known
        return found


def logprob_dicts(logprobs: Logprobs, tokenizer: Tokenizer | None) -> list[dict[int, Logprob]]:
    """Returns one dict per token: the token itself first, then the likeliest, best first."""
    entries = []
    rows = zip(
        logprobs.ids.tolist(), logprobs.values.tolist(), logprobs.ranks.tolist(), strict=True
    )
    for ids, values, rank in rows:
        entry = {ids[0]: Logprob(values[0], rank, _decoded(tokenizer, ids[0]))}
        for place in range(1, len(ids)):
            id = ids[place]
            if id >= 0 and id not in entry:
                entry[id] = Logprob(values[place], place, _decoded(tokenizer, id))
        entries.append(entry)
    return entries


def _decoded(tokenizer: Tokenizer | None, id: int) -> str | None:
    return None if tokenizer is None else tokenizer.token_text(id)


class PromptLogprobCollector:
    """Collects a prompt's log-probabilities, which arrive chunk by chunk."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.entries: list[dict[int, Logprob] | None] = [None]

    def feed(self, logprobs: Logprobs) -> None:
        self.entries += logprob_dicts(logprobs, self._tokenizer)
