"""A map from prompts, as the router sees them, to the KV blocks of engines.

The router sees a prompt's bytes, but an engine sees its tokens. An answer reports the blocks of its
prompt (see `prompt_report`), and the router stores them under the prompt's beginnings. When it sees
such a beginning again, it knows the last block in it. The replicas' events say which replica holds
that block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from quire.router.prompts import PIECE_BYTES, Prompt

_MOST_KEYS = 1 << 17
_FIRST_BYTES_PER_TOKEN = 4.0
_KEPT = 0.98
"""Weight of the earlier prompts in the moving average of bytes per token."""

Block = tuple[int, bytes]
"""A block: number of the prompt's tokens up to its end, and its hash in events."""

_NO_BLOCK = (0, b"")
"""Stored for a beginning that is shorter than the prompt's first reported block."""


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A prompt with the blocks that are known for its beginning.

    Attributes:
        tokens: estimated number of tokens.
        keys: keys of its whole pieces.
        piece_tokens: estimated tokens in a piece.
        blocks: known blocks of the prompt, in ascending order.
    """

    tokens: int
    keys: Sequence[bytes]
    piece_tokens: float
    blocks: Sequence[Block] = ()


class PrefixMap:
    """Maps the keys of prompts' pieces to blocks.

    Args:
        most: largest number of keys. Keys that were recorded longest ago are dropped first.
    """

    def __init__(self, most: int = _MOST_KEYS) -> None:
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._most = most
        self._bytes_per_token = _FIRST_BYTES_PER_TOKEN

    def look_up(self, prompt: Prompt) -> KnownPrompt:
        """Returns a prompt with the blocks that are known for its beginnings."""
        keys, known = prompt.keys, self._blocks
        tokens = prompt.size / self._bytes_per_token
        found: list[Block] = []
        for place, key in enumerate(keys, 1):
            block = known.get(key)
            if block is None:
                break
            if block[0] > (found[-1][0] if found else 0):
                found.append(block)
                rest = prompt.size - place * PIECE_BYTES
                tokens = block[0] + rest / self._bytes_per_token
        return KnownPrompt(int(tokens), keys, PIECE_BYTES / self._bytes_per_token, found)

    def learn(self, prompt: Prompt, tokens: int, blocks: Sequence[Block]) -> None:
        """Records a prompt's number of tokens and its reported blocks, in ascending order."""
        if not tokens or not prompt.size:
            return
        ratio = prompt.size / tokens
        self._bytes_per_token = _KEPT * self._bytes_per_token + (1 - _KEPT) * ratio
        place = -1
        for count, key in enumerate(prompt.keys, 1):
            end = count * PIECE_BYTES / ratio
            while place + 1 < len(blocks) and blocks[place + 1][0] <= end:
                place += 1
            self._blocks[key] = blocks[place] if place >= 0 else _NO_BLOCK
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
