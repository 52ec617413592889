"""Two ways to accept drafts, over a toy target and a toy draft."""

from __future__ import annotations

import torch
from torch import Tensor

DRAWS = 40_000
TARGET = torch.tensor([0.45, 0.25, 0.12, 0.10, 0.05, 0.03])
DRAFT = torch.tensor([0.30, 0.20, 0.30, 0.05, 0.05, 0.10])


def ratio_test(target: Tensor, draft: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Leviathan et al. 2023: keeps a draft x with probability min(1, p(x) / q(x)), else draws from
    what the target has more of. Returns the tokens int64 [DRAWS], and which drafts were kept."""
    x = torch.multinomial(draft, DRAWS, replacement=True, generator=rng)
    kept = torch.rand(DRAWS, generator=rng) < target[x] / draft[x]
    rest = torch.multinomial((target - draft).clamp(min=0), DRAWS, replacement=True, generator=rng)
    return torch.where(kept, x, rest), kept


def shared_noise(target: Tensor, draft: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws both with the same Gumbel noise, and keeps the draft where they agree. The result is
    the target's own draw, so it has the target's distribution for any draft."""
    noise = -torch.empty(DRAWS, len(target)).exponential_(generator=rng).log()
    drawn = (target.log() + noise).argmax(-1)
    return drawn, (draft.log() + noise).argmax(-1) == drawn


def chi_square(tokens: Tensor, distribution: Tensor) -> float:
    """Returns the probability that draws from the distribution deviate from it by more."""
    expected = distribution * len(tokens)
    found = torch.bincount(tokens, minlength=len(distribution))
    statistic = ((found - expected).square() / expected).sum()
    freedom = torch.tensor((len(distribution) - 1) / 2)
    return float(torch.special.gammaincc(freedom, statistic / 2))
