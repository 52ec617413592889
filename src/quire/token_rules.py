"""Rules about the tokens that a request may generate: some alone, and some never."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from quire.arrays import Int32
from quire.errors import RequestError

MAX_ALLOWED = 100_000
"""Most `allowed_token_ids`."""
MAX_BAD = 256
"""Most sequences of `bad_token_ids`."""
MAX_BAD_LENGTH = 64
"""Most tokens of each."""


def check_token_rules(allowed: Sequence[int], bad: Sequence[Sequence[int]]) -> None:
    """Checks `allowed_token_ids` and `bad_token_ids`, but for the vocabulary's end.

    Raises:
        RequestError: naming the field.
    """
    if len(allowed) > MAX_ALLOWED:
        raise _too_many("allowed_token_ids", len(allowed), MAX_ALLOWED)
    _check_ids("allowed_token_ids", allowed)
    if len(bad) > MAX_BAD:
        raise _too_many("bad_token_ids", len(bad), MAX_BAD)
    for tokens in bad:
        if not isinstance(tokens, list | tuple) or not 1 <= len(tokens) <= MAX_BAD_LENGTH:
            raise RequestError(
                f"bad_token_ids must be lists of 1 to {MAX_BAD_LENGTH} token ids", "bad_token_ids"
            )
        _check_ids("bad_token_ids", tokens)


def _too_many(name: str, count: int, most: int) -> RequestError:
    return RequestError(f"{name} has {count} entries, at most {most} are allowed", name)


def _check_ids(name: str, ids: Iterable[object]) -> None:
    for id in ids:
        if type(id) is not int or not 0 <= id < 2**31:
            raise RequestError(f"{name} must be token ids (integers from 0), got {id!r}", name)


class TokenRules:
    """Clears the bits of tokens that may not come from masks.

    Args:
        allowed: the tokens that may come; none: all.
        bad: sequences whose last token may not come behind the others.
        vocab_size: tokens of the model.

    Raises:
        RequestError: a token is outside of the vocabulary, or none may ever come.
    """

    def __init__(
        self, allowed: Sequence[int], bad: Sequence[Sequence[int]], vocab_size: int
    ) -> None:
        for name, lists in (("allowed_token_ids", [allowed]), ("bad_token_ids", bad)):
            last = max((max(ids, default=0) for ids in lists), default=0)
            if last >= vocab_size:
                raise RequestError(
                    f"{name} has token id {last}, but the vocabulary ends at {vocab_size - 1}", name
                )
        free = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
        free[list(allowed) if allowed else slice(None, vocab_size)] = 1
        free[[tokens[0] for tokens in bad if len(tokens) == 1]] = 0
        if not free.any():
            name = "allowed_token_ids" if allowed else "bad_token_ids"
            raise RequestError(f"{name} leaves no token that may come", name)
        self._free: Int32 = np.packbits(free, bitorder="little").view(np.int32)
        self._behind: dict[int, list[tuple[list[int], int]]] = {}
        """By the token before the last: the tokens before the last, and the last."""
        for tokens in bad:
            if len(tokens) > 1:
                rule = list(tokens[:-1]), tokens[-1]
                self._behind.setdefault(tokens[-2], []).append(rule)
        self.reach = max((len(tokens) - 1 for tokens in bad), default=0)
        """Tokens before a place that decide about it."""

    @property
    def words(self) -> int:
        """Words of a mask."""
        return len(self._free)

    def hold(self, tokens: Sequence[int], before: Sequence[int]) -> bool:
        """Whether each of some tokens may come behind those before it. before: the last generated
        tokens, `reach` of them or all."""
        text = [*before, *tokens]
        for place, token in enumerate(tokens, len(before)):
            if not self._free[token >> 5] >> (token & 31) & 1:
                return False
            for head, last in self._behind.get(text[place - 1], ()) if place else ():
                if last == token and text[max(0, place - len(head)) : place] == head:
                    return False
        return True

    def apply(self, mask: Int32, before: list[int]) -> None:
        """Clears bits of a mask, int32 [ceil(vocab / 32)].

        Args:
            before: the last generated tokens, `reach` of them or all.
        """
        mask &= self._free
        for tokens, last in self._behind.get(before[-1], ()) if before else ():
            if before[-len(tokens) :] == tokens:
                mask[last >> 5] &= ~np.uint32(1 << (last & 31)).view(np.int32)
