"""Fields that speak of the vocabulary or of the prompt's tokens, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire.errors import RequestError
from quire.sampling_params import MAX_BAD_LENGTH, MAX_LOGPROBS
from quire.server.chat.text import Prompt
from quire.server.errors import ApiError
from quire.server.http.strict_model import TruncationSide, cut_prompt

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

_BREAKERS = ("\n", ":", '"', "*")
_MUCH_TEXT = 4000
"""Characters above which texts are tokenized off the event loop."""


def bad_token_ids(tokenizer: Tokenizer, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the sequences of tokens that make the words of `bad_words`.

    A word is banned at a text's beginning and behind a space, where its tokens may be others.

    Raises:
        ApiError: a word is empty or too long.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(words):
        ids = _ids(tokenizer, word)
        if not 1 <= len(ids) <= MAX_BAD_LENGTH:
            raise ApiError(
                400,
                f"Invalid value for 'bad_words[{place}]': a word has 1 to {MAX_BAD_LENGTH} tokens, "
                f"and this one {len(ids)}.",
                param=f"bad_words[{place}]",
                code="invalid_value",
            )
        sequences[ids] = None
        spaced = _ids(tokenizer, f" {word.lstrip()}")
        if 1 <= len(spaced) <= MAX_BAD_LENGTH:
            sequences[spaced] = None
    return tuple(sequences)


def breaker_ids(tokenizer: Tokenizer, words: list[str] | None) -> tuple[int, ...]:
    """Returns the tokens that break repeated sequences: the last of each word behind a letter.

    Args:
        words: `dry_sequence_breakers`; None: those that DRY was published with.
    """
    found = {_ids(tokenizer, f"a{word}")[-1] for word in (_BREAKERS if words is None else words)}
    return tuple(sorted(found))


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False).tolist())


def count_of_logprobs(name: str, asked: int, vocab_size: int) -> int:
    """Returns how many alternatives a field asks for, -1 being the whole vocabulary.

    Raises:
        RequestError: there are more tokens than one may ask for.
    """
    if asked >= 0:
        return asked
    if vocab_size > MAX_LOGPROBS:
        raise RequestError(
            f"{name} -1 asks for the whole vocabulary of {vocab_size} tokens; at most "
            f"{MAX_LOGPROBS} are possible",
            name,
        )
    return vocab_size


def prompt_room(truncate: int | None, longest: int, max_tokens: int | None) -> int | None:
    """Returns the most tokens of a prompt, None for no limit.

    Args:
        truncate: `truncate_prompt_tokens`; -1 leaves room for `max_tokens`, or one.
        longest: tokens of the context.
    """
    return max(1, longest - (max_tokens or 1)) if truncate == -1 else truncate


async def prompt_tokens(
    tokenizer: Tokenizer | None,
    prompts: list[Prompt],
    *,
    special: bool,
    most: int | None,
    side: TruncationSide | None = None,
    longest: int,
) -> list[Prompt]:
    """Tokenizes prompts, of which the last `most` tokens are kept, or the first ones.

    Args:
        special: adds the tokenizer's special tokens.
        most: None keeps all, and refuses a text that cannot have as few as `longest`.
        side: see `cut_prompt`.
    """

    def tokenized(prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if tokenizer is None:  # the route has refused it
                raise RequestError("a text prompt needs a tokenizer", "prompt")
            limit = longest if most is None else None
            ids: list[int] = tokenizer.encode(prompt, special, limit).tolist()
        else:
            ids = prompt
        return cut_prompt(ids, most, side)

    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    if size <= _MUCH_TEXT:
        return [tokenized(prompt) for prompt in prompts]
    return await asyncio.to_thread(lambda: [tokenized(prompt) for prompt in prompts])
