"""Errors of the `tokenizers` library, as errors of the request whose text or tokens caused them."""

from __future__ import annotations

from quire.errors import RequestError


def refused(error: BaseException, what: str) -> RequestError:
    """Returns the error of a request whose text or tokens the library refuses.

    The library panics where a pattern of the tokenizer fails, and a panic is no Exception. What is
    neither is raised as it is, an interrupt say.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return RequestError(f"{what}: {error}", "prompt")
