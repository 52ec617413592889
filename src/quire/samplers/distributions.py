"""Changes of distributions, for all rows at once and without a wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.ops.reference import random

LONGEST_MATCH = 50
"""Tokens of a repeated sequence that are looked at: penalties grow no further."""

_XTC = 17
"""The draw that decides whether top choices are left out. No other use of a position has it."""

_MOST = 1e9

Counter = tuple[Tensor, Tensor, Tensor]
"""seed int32 [K, 2], sample index int32 [K], position int32 [K]."""


def dry_penalty(
    tokens: Tensor,
    lengths: Tensor,
    vocab_size: int,
    *,
    multiplier: Tensor,
    base: Tensor,
    allowed: Tensor,
    last: Tensor,
    breakers: Tensor,
) -> Tensor:
    """Returns what DRY ("don't repeat yourself") takes off the logits, float32 [K, vocab].

    A token that stands in the text behind the same sequence of `n` tokens as the text ends with,
    the longest such, costs multiplier * base ** (n - allowed), if `n` is `allowed` or more. No
    sequence goes over a breaker, and no breaker costs anything.

    tokens: int32 [K, max_len], of which each row has `lengths` int32 [K]. multiplier, base,
    allowed, last: float32 [K]; last: the last tokens to look at, -1: all. breakers: int32 [K, B],
    -1 where there is none.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    end = lengths.long().unsqueeze(1)
    first = torch.where(last < 0, 0, lengths - last).clamp(min=0).long().unsqueeze(1)
    text = (places >= first) & (places < end)
    breaks = _in_rows(tokens, breakers)
    alive = text & ~breaks
    longest = torch.zeros_like(tokens)
    for back in range(1, LONGEST_MATCH + 1):
        earlier = (places - back).clamp(min=0).expand_as(tokens)
        token = tokens.gather(1, earlier)
        ending = tokens.gather(1, (end - back).clamp(min=0))
        alive = alive & (token == ending) & (places - back >= first)
        alive &= ~breaks.gather(1, (end - back).clamp(min=0))
        longest += alive
    matched = longest.float()
    weight = multiplier.unsqueeze(1) * base.unsqueeze(1) ** (matched - allowed.unsqueeze(1))
    weight = torch.where((matched >= allowed.unsqueeze(1)) & (matched > 0), weight, 0.0)
    found = torch.zeros(len(tokens), vocab_size, device=tokens.device)
    own = tokens.long().clamp(0, vocab_size - 1)
    return found.scatter_reduce(1, own, weight.clamp(max=_MOST), "amax", include_self=True)


def _in_rows(tokens: Tensor, breakers: Tensor) -> Tensor:
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for column in breakers.unbind(1):
        found |= tokens == column.unsqueeze(1)
    return found


def typical_p(logits: Tensor, mass: Tensor) -> Tensor:
    """Keeps the tokens whose surprise is closest to the distribution's entropy, as few as reach
    `mass` [K]; others become -inf (Meister et al., 2023, "Locally Typical Sampling").

    logits: float32 [K, vocab], after temperature.
    """
    logs = logits.log_softmax(dim=-1)
    probs = logs.exp()
    entropy = -(probs * logs).nansum(dim=-1, keepdim=True)
    distance = (-logs - entropy).abs()
    order = distance.sort(dim=-1, stable=True).indices
    reached = probs.double().gather(1, order).cumsum(dim=-1)
    before = reached - probs.double().gather(1, order)
    kept = (before < mass.double().unsqueeze(1)) | (mass >= 1.0).unsqueeze(1)
    kept[:, 0] = True
    return logits.masked_fill(~torch.empty_like(kept).scatter_(1, order, kept), -torch.inf)


def without_top_choices(
    logits: Tensor, counter: Counter, *, probability: Tensor, threshold: Tensor
) -> Tensor:
    """Leaves out the top choices of some rows: all tokens of `threshold` [K] and more but the least
    likely of them ("exclude top choices"). They become -inf.

    logits: float32 [K, vocab], after temperature and truncation. probability: [K], of a row to be
    one of them, drawn for `counter`.
    """
    none = torch.zeros(len(logits), 1, dtype=torch.int64, device=logits.device)
    # The distribution function of the noise, at the noise, is uniform.
    drawn = torch.exp(-torch.exp(-random.gumbel_at(*counter, none, draw=_XTC)))
    probs = logits.softmax(dim=-1)
    choices = probs >= threshold.unsqueeze(1)
    least = torch.where(choices, probs, torch.inf).amin(dim=-1, keepdim=True)
    left_out = choices & (probs > least) & (drawn < probability.unsqueeze(1))
    return logits.masked_fill(left_out, -torch.inf)
