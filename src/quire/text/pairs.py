"""Tokenizes texts and pairs of texts for encoders: cut texts keep their special tokens."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from quire.arrays import Int32, int32
from quire.errors import RequestError
from quire.text.tokenizer import Tokenizer, check_length, tokenizer_error

Side = Literal["left", "right"]


_MUCH_TEXT = 1 << 20
"""Characters above which texts are tokenized one by one, where long ones are refused early."""


def encode_texts(tokenizer: Tokenizer, prompts: list[Any]) -> list[Any]:
    """Returns prompts with the token ids of texts, int32 [n], tokenized on all cores."""
    places = [place for place, prompt in enumerate(prompts) if isinstance(prompt, str)]
    if len(places) < 2 or sum(len(prompts[place]) for place in places) > _MUCH_TEXT:
        return prompts
    try:
        found = tokenizer.hub.encode_batch_fast([prompts[place] for place in places])
    except BaseException as error:  # Lone surrogates, or a panic of the library.
        raise tokenizer_error(error, "the texts cannot be tokenized") from error
    encoded = list(prompts)
    for place, each in zip(places, found, strict=True):
        encoded[place] = int32(each.ids)
    return encoded


def cut_text(tokenizer: Tokenizer, text: str, most: int, side: Side | None = None) -> Int32:
    """Returns at most `most` token ids of a text, int32 [n], special tokens included.

    Args:
        side: where tokens are cut; None: where the tokenizer's configuration says.

    Raises:
        RequestError: the special tokens alone are more than `most`.
    """
    (tokens,) = _encode(tokenizer, [text])
    room = most - tokenizer.hub.num_special_tokens_to_add(False)
    _check_room(room, most)
    _cut(tokenizer, tokens, room, side)
    return int32(tokenizer.hub.post_process(tokens, None, True).ids)


def encode_pair(
    tokenizer: Tokenizer,
    first: str,
    second: str,
    *,
    most: int | None = None,
    longest: int | None = None,
    side: Side | None = None,
) -> tuple[Int32, int | None]:
    """Returns the token ids of a pair, int32 [n], and the position of the first token of type 1.

    The position is None for tokenizers that give all tokens the type 0.

    Args:
        most: cut the pair to so many tokens, the longer text first; None keeps all.
        longest: without `most`, refuse a text with more tokens, if a part already shows that.
        side: see `cut_text`.

    Raises:
        RequestError: a text is too long, or the special tokens alone are more than `most`.
    """
    if most is None and longest is not None:
        for text in (first, second):
            if len(text) > longest:
                check_length(text, longest, tokenizer.longest, tokenizer.encode)
    one, other = _encode(tokenizer, [first, second])
    if most is not None:
        room = most - tokenizer.hub.num_special_tokens_to_add(True)
        _check_room(room, most)
        sizes = _shares(len(one), len(other), room)
        for tokens, size in zip((one, other), sizes, strict=True):
            _cut(tokenizer, tokens, size, side)
    both = tokenizer.hub.post_process(one, other, True)
    types = np.asarray(both.type_ids)
    (places,) = np.nonzero(types)
    if not len(places):
        return int32(both.ids), None
    start = int(places[0])
    if not (types[start:] == 1).all():
        raise RequestError("the tokenizer's token types are not 0, then 1", "text_2")
    return int32(both.ids), start


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[Any]:
    """Returns the library's encodings of texts, without special tokens."""
    try:
        # Unlike `encode_batch`, the fast one releases the GIL.
        return list(tokenizer.hub.encode_batch_fast(texts, add_special_tokens=False))
    except BaseException as error:  # Lone surrogates, or a panic of the library.
        raise tokenizer_error(error, "the text cannot be tokenized") from error


def _check_room(room: int, most: int) -> None:
    if room < 0:
        raise RequestError(
            f"truncate_prompt_tokens {most} is less than the number of special tokens",
            "truncate_prompt_tokens",
        )


def _cut(tokenizer: Tokenizer, tokens: Any, most: int, side: Side | None) -> None:
    own = tokenizer.config.get("truncation_side")
    tokens.truncate(most, direction=side or ("left" if own == "left" else "right"))


def _shares(first: int, second: int, most: int) -> tuple[int, int]:
    """Returns how many tokens of each text are kept, as the `tokenizers` library shares them."""
    if first + second <= most:
        return first, second
    short, long = sorted((first, second))
    long = short if short > most else max(short, most - short)
    if short + long > most:
        short = most // 2
        long = short + most % 2
    return (long, short) if first > second else (short, long)
