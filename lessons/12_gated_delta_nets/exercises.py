"""Three exercises on recurrent states.

python -m lessons check 12
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def short_convolution(x: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the causal convolution of each channel over a part of a sequence, [tokens, channels],
    and what the next part needs, [taps - 1, channels].

    x: [tokens, channels]. weight: [channels, taps]; the last tap is the token's own. before: the
    last taps - 1 inputs of the part before, the oldest first; zeros at the sequence's beginning.
    """
    raise NotImplementedError


def longest_resumable(checkpoints: Sequence[int], kv_tokens: int, prompt: int) -> int:
    """Returns how many tokens of a prompt need not be computed.

    checkpoints: lengths of its prefixes of which a state is kept, in any order. kv_tokens: the
    length of its prefix whose keys and values are kept. Both are needed for the same length; the
    last token of the prompt is always computed.
    """
    raise NotImplementedError


def break_even(state_bytes: int, token_bytes: int) -> int:
    """Returns the least number of tokens whose keys and values take more memory than a state."""
    raise NotImplementedError
