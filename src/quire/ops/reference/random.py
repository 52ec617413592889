"""Counter-based random numbers: a pure function of (seed, sample index, position, draw).

The generator is Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).
The same seed gives the same tokens in any batch, on any device, after any preemption."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

SAMPLE = 0
"""The draw number for sampling a token. Other uses of the same position have other draw numbers."""


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns four random words per counter.

    All tensors are int64, hold unsigned 32-bit words and can be broadcast to one shape.
    """
    shape = np.broadcast_shapes(*(word.shape for word in (*counter, *key)))
    # The operations work in place, because fresh memory for each of a hundred operations would cost
    # more time than the operations. Bits above a word's low 32 are cleared before it is a factor.
    c0, c1, c2, c3 = (word.expand(shape).clone() for word in counter)
    k0, k1 = key
    spare = torch.empty_like(c0)
    for _ in range(_ROUNDS):
        # A 64-bit product wraps to the right bits; the mask makes its high word unsigned.
        c0.mul_(_M0)
        c2.mul_(_M1)
        torch.bitwise_right_shift(c2, 32, out=spare)
        c1.bitwise_xor_(spare).bitwise_xor_(k0).bitwise_and_(_MASK)
        torch.bitwise_right_shift(c0, 32, out=spare)
        c3.bitwise_xor_(spare).bitwise_xor_(k1).bitwise_and_(_MASK)
        c0, c1, c2, c3 = c1, c2, c3, c0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


def gumbel(
    seed: Tensor, sample_index: Tensor, position: Tensor, vocab_size: int, draw: int = SAMPLE
) -> Tensor:
    """Returns standard Gumbel noise, float32 [N, vocab_size].

    Entry v of a row comes from word v % 4 of the counter (v // 4, position, sample index, draw).

    Args:
        seed: int32 [N, 2], low and high word.
        sample_index, position: int32 [N].
    """
    quads = torch.arange(-(-vocab_size // 4), device=seed.device).unsqueeze(0)
    words = _words(seed, sample_index, position, quads, draw)
    return _noise(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])


def gumbel_at(
    seed: Tensor, sample_index: Tensor, position: Tensor, entries: Tensor, draw: int = SAMPLE
) -> Tensor:
    """Returns the noise of `gumbel` at entries int64 [N, W], as float32 [N, W]."""
    words = _words(seed, sample_index, position, entries >> 2, draw)
    word = torch.stack(words, dim=-1).gather(-1, (entries & 3).unsqueeze(-1))
    return _noise(word.squeeze(-1))


def _words(
    seed: Tensor, sample_index: Tensor, position: Tensor, quads: Tensor, draw: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    where, which = (word.long().unsqueeze(1) & _MASK for word in (position, sample_index))
    low, high = (seed[:, i].long().unsqueeze(1) & _MASK for i in (0, 1))
    return philox((quads, where, which, torch.full_like(low, draw)), (low, high))


def _noise(words: Tensor) -> Tensor:
    """Returns the noise of int64 words, which are overwritten."""
    # 23 random bits plus one half give numbers strictly between 0 and 1 that are exact in float32.
    # With 24 bits the largest number would round to 1, and its noise would be infinite.
    uniform = (words >> 9).float().add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()
