"""Log-probabilities in OpenAI's two formats.

There may be a million in one answer. So those of each token are encoded as soon as they are
formatted: encoded, they are small, can stand in many choices, and no step keeps other threads
waiting.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from quire.outputs import Logprob
from quire.server.apis.openai.objects import (
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprobs,
)

if TYPE_CHECKING:
    from quire.engine.loop.output import CompletionUpdate
    from quire.text.tokenizer import Tokenizer

T = TypeVar("T")

Entry = Mapping[int, Logprob] | None
"""A token's log-probabilities by token. None: the first token of a prompt has none."""

_MANY = 2000
"""Log-probabilities above which they are formatted off the event loop."""

_encode = msgspec.json.Encoder().encode

_FLOOR = -9999.0
"""Stands for minus infinity, which JSON lacks: a token that a bias or a mask made impossible."""


def _finite(value: float) -> float:
    return max(value, _FLOOR)


def entries_in(entries: Sequence[Entry]) -> int:
    """Returns the number of log-probabilities of all tokens."""
    return sum(len(entry) for entry in entries if entry is not None)


def array_entries(last: CompletionUpdate | None) -> int:
    """Returns the number of values that a choice's last update adds to its answer."""
    if last is None:
        return 0
    sampled = 0 if last.sampling_info is None else 3 * len(last.token_ids)
    return sampled + (0 if last.routed_experts is None else last.routed_experts.size // 8)


def are_many(count: int) -> bool:
    """Tells whether to format so many log-probabilities in a thread."""
    return count > _MANY


async def formatted(count: int, make: Callable[[], T]) -> T:
    """Returns what `make` makes of `count` log-probabilities; a thread makes it of many."""
    return await asyncio.to_thread(make) if are_many(count) else make()


def _top(entry: Mapping[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """Returns the `count` likeliest of an entry, likeliest first.

    The sampled token is in the entry even where it is not among them.
    """
    ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)
    return ranked[:count]


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[dict[int, Logprob]],
    count: int,
    *,
    as_ids: bool = False,
) -> Iterator[ChatTokenLogprob]:
    """Yields the log-probabilities of tokens. as_ids: tokens are named by their ids."""

    def named(token: int) -> tuple[str, list[int]]:
        text, data = _text_and_bytes(tokenizer, token)
        return (_id_name(token) if as_ids else text), data

    for token, entry in zip(token_ids, entries, strict=True):
        own = entry[token]
        text, data = named(token)
        top = []
        for other, value in _top(entry, count):
            name, bytes = named(other)
            top.append(ChatTopLogprob(name, _finite(value.logprob), bytes))
        yield ChatTokenLogprob(text, _finite(own.logprob), data, top)


def encoded(value: Any) -> msgspec.Raw:
    """Returns a value as JSON, to stand in an answer."""
    return msgspec.Raw(_encode(value))


def _text_and_bytes(tokenizer: Tokenizer, token: int) -> tuple[str, list[int]]:
    data = tokenizer.token_bytes(token)
    return data.decode("utf-8", "replace"), list(data)


def _id_name(token: int) -> str:
    return f"token_id:{token}"


class CompletionLogprobWriter:
    """Formats one completion's log-probabilities piece by piece.

    `text_offset` is the place of a token's first character in the returned text, the echoed prompt
    included. A token that only continues a character gets the place of the next one.
    """

    def __init__(self, tokenizer: Tokenizer, count: int, *, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self.as_ids = as_ids
        self.count = count
        self.offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def fork(self) -> CompletionLogprobWriter:
        """Returns a writer that goes on where this one is."""
        other = CompletionLogprobWriter(self.tokenizer, self.count, as_ids=self.as_ids)
        other.offset = self.offset
        other._decoder.setstate(self._decoder.getstate())
        return other

    def write(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> CompletionLogprobs:
        out = CompletionLogprobs()
        tops: list[msgspec.Raw | None] = []
        for token, entry in zip(token_ids, entries, strict=True):
            out.tokens.append(self._name(token))
            out.text_offset.append(self.offset)
            out.token_logprobs.append(None if entry is None else _finite(entry[token].logprob))
            if self.count:
                tops.append(None if entry is None else encoded(self._alternatives(token, entry)))
            self.offset += len(self._decoder.decode(self._visible(token)))
        out.top_logprobs = tops if self.count else None
        return out

    def _alternatives(self, token: int, entry: Mapping[int, Logprob]) -> dict[str, float]:
        """Returns the likeliest tokens and the sampled one: up to `count` + 1.

        Tokens of equal text count as the likelier one.
        """
        chosen = _top(entry, self.count)
        if all(other != token for other, _ in chosen):
            chosen.append((token, entry[token]))
        out: dict[str, float] = {}
        for other, value in chosen:
            out.setdefault(self._name(other), _finite(value.logprob))
        return out

    def _name(self, token: int) -> str:
        """Returns the token's text, or `bytes:\\xe2\\x96` where it is no whole text by itself; or
        its id, where ids are asked for."""
        if self.as_ids:
            return _id_name(token)
        data = self.tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _visible(self, token: int) -> bytes:
        """Returns the token's bytes in the text; special tokens leave none."""
        if not self.tokenizer.decode([token], skip_special_tokens=True):
            return b""
        return self.tokenizer.token_bytes(token)


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Returns the log-probabilities of two pieces as those of one."""
    tops = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        tops = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        tops,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(entries: Sequence[Entry] | None) -> PromptLogprobs:
    """Returns prompt log-probabilities in vLLM's format: per token, id to log-probability, rank and
    text."""
    return [None if entry is None else encoded(_by_id(entry)) for entry in entries or ()]


def _by_id(entry: Mapping[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token): {
            "logprob": _finite(value.logprob),
            "rank": value.rank,
            "decoded_token": value.decoded_token,
        }
        for token, value in entry.items()
    }
