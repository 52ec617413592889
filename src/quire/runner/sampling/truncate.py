"""Keeping only the likely tokens.

`top_k_top_p` says what is kept, over the whole vocabulary. `pick_likely` draws from the same tokens
but sorts no more than it must: most rows keep a few hundred of a vocabulary of many thousands.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_NARROW = 256
"""Likeliest tokens to look at for a nucleus, before all of them are sorted."""

Noise = Callable[[Tensor, Tensor], Tensor]
"""(rows int64 [n], entries int64 [n, W]) -> their noise float32 [n, W]."""


def min_p(logits: Tensor, threshold: Tensor) -> Tensor:
    """Drops tokens less likely than `threshold` [N] times the likeliest (Nguyen et al., 2024).
    logits: [N, V], after temperature; returns it with -inf for what is dropped."""
    floor = logits.amax(dim=-1, keepdim=True) + threshold.unsqueeze(1).log()
    return logits.masked_fill(logits < floor, -torch.inf)


def top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the `top_k` [N] (0: all) likeliest tokens, ties included, and of those the fewest whose
    probabilities reach `top_p` [N] (nucleus sampling, Holtzman et al., 2019)."""
    probs = logits.softmax(dim=-1)
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    kept = _kept(ordered, probs.gather(1, index), top_k, top_p)
    return torch.empty_like(logits).scatter_(1, index, ordered.masked_fill(~kept, -torch.inf))


def pick_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, noise: Noise) -> Tensor:
    """For each row the kept token of the largest logit plus noise, int64 [N].

    logits: float32 [N, V], after temperature and min-p, on a CPU: which rows need a wider look is
    read from the result of the first. What a row keeps does not depend on how far one looked.
    """
    vocab = logits.shape[1]
    probs = logits.softmax(dim=-1)
    # One more than top-k, to see that nothing is tied with the last.
    width = int(torch.where(top_k > 0, top_k.clamp(max=vocab) + 1, _NARROW).amax())
    everyone = torch.arange(len(logits))
    if width > vocab // 8:
        return _pick(logits, probs, top_k, top_p, noise, everyone, vocab)[0]
    tokens, settled = _pick(logits, probs, top_k, top_p, noise, everyone, width)
    if not settled.all():
        rows = (~settled).nonzero().squeeze(1)
        again = _pick(logits[rows], probs[rows], top_k[rows], top_p[rows], noise, rows, vocab)
        tokens[rows] = again[0]
    return tokens


def _pick(
    logits: Tensor,
    probs: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    noise: Noise,
    rows: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    """(tokens, which of them are certain) when only `width` tokens are looked at."""
    if width < logits.shape[1]:
        index = logits.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
        values = logits.gather(1, index)
        values, order = values.sort(dim=-1, descending=True, stable=True)
        index = index.gather(1, order)
    else:
        values, index = logits.sort(dim=-1, descending=True, stable=True)
    kept = _kept(values, probs.gather(1, index), top_k, top_p)
    scores = (values + noise(rows, index)).masked_fill_(~kept, -torch.inf)
    tokens = index.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)
    # Tokens as likely as the last one seen may lie beyond it.
    return tokens, ~(kept & (values == values[:, -1:])).any(dim=-1)


def _kept(ordered: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Which of a row's likeliest tokens [N, W], in order, stay; probs: among all of the row's.

    Sums run from the first token on and in float64, so that they are the same for every W.
    """
    last = top_k.clamp(max=ordered.shape[1]).long() - 1
    threshold = ordered.gather(1, last.clamp(min=0).unsqueeze(1))
    kept = (ordered > -torch.inf) & ((ordered >= threshold) | (top_k <= 0).unsqueeze(1))
    mass = (probs.double() * kept).cumsum(dim=-1)
    whole = torch.where(top_k > 0, mass[:, -1], 1.0).unsqueeze(1)
    before = mass - probs * kept
    reach = top_p.unsqueeze(1)
    kept &= (before < reach * whole) | (reach >= 1.0)
    kept[:, 0] = True
    return kept
