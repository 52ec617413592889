"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.outputs import Logprob
from quire.server.openai.objects import (
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprobs,
)

if TYPE_CHECKING:
    from quire.engine.tokenizer import Tokenizer

_FLOOR = -9999.0
"""Stands for minus infinity, which JSON lacks: a token that a bias or a mask made impossible."""


def _finite(value: float) -> float:
    return max(value, _FLOOR)


def _top(entry: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
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
) -> list[ChatTokenLogprob]:
    """Returns the log-probabilities of tokens. as_ids: tokens are named by their ids."""

    def named(token: int) -> tuple[str, list[int]]:
        text, data = _text_and_bytes(tokenizer, token)
        return (_id_name(token) if as_ids else text), data

    out = []
    for token, entry in zip(token_ids, entries, strict=True):
        own = entry[token]
        text, data = named(token)
        top = []
        for other, value in _top(entry, count):
            name, bytes = named(other)
            top.append(ChatTopLogprob(name, _finite(value.logprob), bytes))
        out.append(ChatTokenLogprob(text, _finite(own.logprob), data, top))
    return out


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

    def write(
        self, token_ids: Sequence[int], entries: Sequence[dict[int, Logprob] | None]
    ) -> CompletionLogprobs:
        out = CompletionLogprobs()
        tops: list[Any] = []
        for token, entry in zip(token_ids, entries, strict=True):
            out.tokens.append(self._name(token))
            out.text_offset.append(self.offset)
            out.token_logprobs.append(None if entry is None else _finite(entry[token].logprob))
            tops.append(None if entry is None else self._alternatives(token, entry))
            self.offset += len(self._decoder.decode(self._visible(token)))
        out.top_logprobs = tops if self.count else None
        return out

    def _alternatives(self, token: int, entry: dict[int, Logprob]) -> dict[str, float]:
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


def prompt_logprobs(
    entries: Sequence[dict[int, Logprob] | None] | None,
) -> PromptLogprobs | None:
    """Returns prompt log-probabilities in vLLM's format: per token, id to log-probability, rank and
    text."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": _finite(value.logprob),
                "rank": value.rank,
                "decoded_token": value.decoded_token,
            }
            for token, value in entry.items()
        }
        for entry in entries
    ]
