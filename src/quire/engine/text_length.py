"""Refusal of texts that have more tokens than a context, by as little of them as will do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.errors import RequestError

if TYPE_CHECKING:
    from quire.engine.tokenizer import Tokenizer

_CHARS = 6
"""Characters for each token that is allowed, in the part of a long text that is tokenized first."""
_MARGIN = 1.25
"""Where a text is cut, its tokens may be others than in the whole."""


def check_length(tokenizer: Tokenizer, text: str, most: int) -> None:
    """Refuses a text that has more than `most` tokens, unless all of it is needed to tell.

    Raises:
        RequestError: the text is longer than so many of the longest tokens, or its beginning alone
            has a quarter more tokens.
    """
    if len(text) > most * tokenizer.longest:
        raise _too_long(text, most)
    part = most * _CHARS
    if len(text) > 2 * part and len(tokenizer.encode(text[:part])) > most * _MARGIN:
        raise _too_long(text, most)


def _too_long(text: str, most: int) -> RequestError:
    return RequestError(
        f"The prompt has {len(text)} characters, which are more than this model's maximum context "
        f"length of {most} tokens can hold.",
        "prompt",
        "context_length_exceeded",
    )
