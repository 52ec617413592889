"""Refusal of texts that have more tokens than a context, by as little of them as will do."""

from __future__ import annotations

from collections.abc import Callable, Sized

from quire.errors import RequestError

_CHARS = 6
"""Characters for each token that is allowed, in the part of a long text that is tokenized first."""
_MARGIN = 1.25
"""Factor on the tokens that are allowed, as at a cut a text's tokens may be others."""


def check_length(text: str, most: int, longest: int, encode: Callable[[str], Sized]) -> None:
    """Refuses a text that has more than `most` tokens, unless all of it is needed to tell.

    Args:
        longest: upper bound of a token's characters.
        encode: returns a text's tokens.

    Raises:
        RequestError: the text is longer than so many of the longest tokens, or its beginning alone
            has a quarter more tokens.
    """
    if len(text) > most * longest:
        raise _too_long(text, most)
    part = most * _CHARS
    if len(text) > 2 * part and len(encode(text[:part])) > most * _MARGIN:
        raise _too_long(text, most)


def _too_long(text: str, most: int) -> RequestError:
    return RequestError(
        f"The prompt has {len(text)} characters, which are more than this model's maximum context "
        f"length of {most} tokens can hold.",
        "prompt",
        "context_length_exceeded",
    )
