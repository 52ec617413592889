"""Keeps only the likely tokens.

`top_k_top_p` defines the kept tokens, over the whole vocabulary. `pick_likely` draws from the same
tokens, but sorts no more than necessary: most rows keep a few hundred tokens of a vocabulary of
many thousands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_NARROW = 256
"""Number of likeliest tokens that are tried for top-p before all tokens are sorted."""

Noise = Callable[[Tensor], Tensor]
"""Returns the noise, float32 [N, W], of entries, int64 [N, W], with a line for each row."""


def min_p(logits: Tensor, threshold: Tensor) -> Tensor:
    """Returns the logits with -inf for tokens less likely than `threshold` [N] times the likeliest
    (Nguyen et al., 2024).

    Args:
        logits: [N, V], after temperature.
    """
    floor = logits.amax(dim=-1, keepdim=True) + threshold.unsqueeze(1).log()
    return logits.masked_fill(logits < floor, -torch.inf)


def top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the `top_k` [N] (0: all) likeliest tokens, ties included.

    Among them it keeps the fewest whose probabilities reach `top_p` [N] (nucleus sampling, Holtzman
    et al., 2019)."""
    probs = logits.softmax(dim=-1)
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    kept = _kept(ordered, probs.gather(1, index), top_k, top_p)
    return torch.empty_like(logits).scatter_(1, index, ordered.masked_fill(~kept, -torch.inf))


def pick_likely(
    logits: Tensor, top_k: Tensor, top_p: Tensor, noise: Noise
) -> tuple[Tensor, Tensor]:
    """Returns each row's kept token with the largest logit plus noise, int64 [N], and whether that
    result is certain, bool [N].

    A row that keeps too many tokens is uncertain and needs `top_k_top_p`. The kept tokens of a
    certain row do not depend on the number of tokens examined, so they do not depend on other rows.

    Args:
        logits: float32 [N, V], after temperature and min-p.
    """
    rows, vocab = logits.shape
    # One more than top-k, which shows whether another token ties with the last one.
    width = int(torch.where(top_k > 0, top_k.clamp(max=vocab) + 1, _NARROW).amax())
    if width > vocab // 8:
        return torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.bool)
    entries = logits.topk(width, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = logits.gather(1, entries).sort(dim=-1, descending=True, stable=True)
    entries = entries.gather(1, order)
    kept = _kept(ordered, logits.softmax(dim=-1).gather(1, entries), top_k, top_p)
    scores = (ordered + noise(entries)).masked_fill_(~kept, -torch.inf)
    tokens = entries.gather(1, scores.argmax(dim=-1, keepdim=True)).squeeze(1)
    # Tokens as likely as the last one seen may lie beyond it.
    return tokens, ~(kept & (ordered == ordered[:, -1:])).any(dim=-1)


def _kept(ordered: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Returns which of each row's likeliest tokens stay, bool [N, W].

    Probabilities are summed from the likeliest on, in float64, so the sums are equal for every W.

    Args:
        ordered: logits of the likeliest tokens, [N, W], largest first.
        probs: probabilities of the same tokens among all of the row's tokens.
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
