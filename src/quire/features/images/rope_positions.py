"""Three-part rotary positions (time, row, column) of prompts with images, without torch.

A text token has the same position in all three parts. The tokens of an image share one position in
time, and count rows and columns from it. The text behind an image goes on one position after the
largest of the image. So a sequence uses fewer rotary positions than it has tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.arrays import Int32


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The place of an image in a sequence.

    Attributes:
        start: position of its first token.
        tokens: number of its tokens.
        columns: columns of its tokens.
    """

    start: int
    tokens: int
    columns: int

    @property
    def shift(self) -> int:
        """Change of the rotary positions of all tokens behind the image, at most 0."""
        return max(self.columns, self.tokens // self.columns) - self.tokens


def rope_positions(length: int, spans: Sequence[ImageSpan]) -> tuple[Int32, int]:
    """Returns the rotary positions of a sequence, int32 [3, length], and the delta: what must be
    added to the positions of all tokens behind the sequence.

    Args:
        length: tokens of the sequence.
        spans: its images, in order.
    """
    positions = np.empty((3, length), np.int32)
    done = delta = 0
    for span in spans:
        positions[:, done : span.start] = np.arange(done, span.start) + delta
        done = span.start + span.tokens
        rows, columns = np.divmod(np.arange(span.tokens), span.columns)
        base = span.start + delta
        positions[0, span.start : done] = base
        positions[1, span.start : done] = base + rows
        positions[2, span.start : done] = base + columns
        delta += span.shift
    positions[:, done:] = np.arange(done, length) + delta
    return positions, delta
