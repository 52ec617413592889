"""Prompts as the router knows them, and the blocks that engines have for them.

The router sees bytes, an engine tokens. Answers tell the blocks of their prompts (see
`prompt_report`), so that the router knows for a beginning that it has seen before which block ends
near it, and by events who holds that block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from quire.router.prompts import PIECE_BYTES, Prompt

_MOST_KEYS = 1 << 17
_FIRST_BYTES_PER_TOKEN = 4.0
_KEPT = 0.98
"""Weight of the prompts before in the mean of bytes per token, at each prompt."""

Block = tuple[int, bytes]
"""Tokens up to a block's end, and the block's hash in events."""

_NO_BLOCK = (0, b"")
"""Stands for a beginning that is shorter than the first block that is known."""


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A prompt with what is known of its blocks.

    tokens: about how many. keys: of its whole pieces. piece_tokens: of a piece. blocks: that end
    within it, ascending.
    """

    tokens: int
    keys: Sequence[bytes]
    piece_tokens: float
    blocks: Sequence[Block] = ()


class PrefixMap:
    """Maps the keys of prompts' pieces to blocks. Keeps the newest."""

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
        """Takes note of a prompt's tokens, and of some of its blocks, ascending."""
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
