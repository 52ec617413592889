"""Counter-based random numbers: a pure function of (seed, sample index, position, draw).

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011), so that the
same seed gives the same tokens whatever else is in the batch, on any device, after any preemption.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

SAMPLE = 0
"""The draw that picks a token. Other uses of the same position take other numbers."""


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words per counter. All tensors int64 that hold unsigned 32-bit words, broadcastable."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A 64-bit product wraps to the right bits; masking the shift makes it unsigned.
        low, high = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((high >> 32) & _MASK) ^ c1 ^ k0,
            high & _MASK,
            ((low >> 32) & _MASK) ^ c3 ^ k1,
            low & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def gumbel(
    seed: Tensor, sample_index: Tensor, position: Tensor, vocab_size: int, draw: int = SAMPLE
) -> Tensor:
    """Standard Gumbel noise, float32 [N, vocab_size].

    seed: int32 [N, 2], low and high word. sample_index, position: int32 [N]. Entry v of a row comes
    from word v % 4 of the counter (v // 4, position, sample index, draw).
    """
    quads = torch.arange(-(-vocab_size // 4), device=seed.device).unsqueeze(0)
    words = [word.long().unsqueeze(1) & _MASK for word in (position, sample_index)]
    low, high = (seed[:, i].long().unsqueeze(1) & _MASK for i in (0, 1))
    fourth = torch.full_like(low, draw)
    out = philox((quads, words[0], words[1], fourth), (low, high))
    bits = torch.stack([part >> 9 for part in out], dim=-1).flatten(1)[:, :vocab_size]
    # 23 bits and a half: strictly between 0 and 1, and exact in float32. With one bit more the
    # largest word would round to 1, whose noise is infinite.
    uniform = (bits.float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
