"""Three exercises on masks.

python -m lessons check 9
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Machine = Mapping[tuple[int, str], int]
"""The next state by state and character. The text begins in state 0."""


def matches(machine: Machine, ends: set[int], text: str) -> bool:
    """Returns whether the machine reads all of a text and is then in a state of `ends`."""
    raise NotImplementedError


def allowed_tokens(machine: Machine, state: int, vocabulary: Sequence[str]) -> np.ndarray:
    """Returns which tokens the machine can read whole from a state, bool [len(vocabulary)].

    vocabulary: the tokens' texts; one of no characters is never allowed.
    """
    raise NotImplementedError


def pack(allowed: np.ndarray) -> np.ndarray:
    """Returns a mask as the engine's kernels read it, int32 [ceil(len(allowed) / 32)].

    allowed: bool [vocab]. Token t is bit t % 32 of word t // 32, the lowest bit first; bits behind
    the last token are 0.
    """
    raise NotImplementedError
